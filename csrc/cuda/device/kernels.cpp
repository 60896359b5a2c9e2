#include "kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "weights_source.h"

namespace attn_ext::cuda {

namespace {

/// What is called of CUDA's driver and of its run-time compiler, by their C interfaces. This file needs
/// neither headers nor libraries of CUDA to be built.
struct Cuda {
  using Result = int;
  template <class... Argument>
  using Function = Result (*)(Argument...);

  Function<void** /*context*/> cuCtxGetCurrent;
  Function<void* /*context*/> cuCtxSetCurrent;
  Function<void** /*context*/, int /*device*/> cuDevicePrimaryCtxRetain;
  Function<void** /*module*/, const void* /*image*/> cuModuleLoadData;
  Function<void** /*function*/, void* /*module*/, const char* /*name*/> cuModuleGetFunction;
  Function<void* /*function*/, int /*attribute*/, int /*value*/> cuFuncSetAttribute;
  Function<void* /*function*/, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
           unsigned /*shared bytes*/, void* /*stream*/, void** /*parameters*/, void** /*extra*/>
      cuLaunchKernel;
  Function<int* /*value*/, int /*attribute*/, int /*device*/> cuDeviceGetAttribute;
  Function<Result, const char** /*text*/> cuGetErrorString;
  Function<void** /*program*/, const char* /*source*/, const char* /*name*/, int /*headers*/,
           const char* const*, const char* const*>
      nvrtcCreateProgram;
  Function<void* /*program*/, int /*count*/, const char* const* /*options*/> nvrtcCompileProgram;
  Function<void* /*program*/, size_t*> nvrtcGetCUBINSize;
  Function<void* /*program*/, char*> nvrtcGetCUBIN;
  Function<void* /*program*/, size_t*> nvrtcGetProgramLogSize;
  Function<void* /*program*/, char*> nvrtcGetProgramLog;
  Function<void** /*program*/> nvrtcDestroyProgram;
  Function<int*> nvrtcGetNumSupportedArchs;
  Function<int*> nvrtcGetSupportedArchs;
  bool is_complete = false;
};

constexpr int kMajor = 75, kMinor = 76, kMostSharedBytes = 97;  // attributes of a device
constexpr int kDynamicSharedBytes = 8;                          // of a function
constexpr int kThreads = 256, kPad = 8;                         // as in weights.cu

/// PyTorch's own library of just these two, which finds them where its wheels put them; it lies beside the
/// others.
void* open_library() {
  Dl_info torch{};
  if (dladdr(reinterpret_cast<void*>(static_cast<void (*)(const c10::Warning&)>(&c10::warn)), &torch) == 0 ||
      torch.dli_fname == nullptr) {
    return nullptr;
  }
  const std::string path = torch.dli_fname;
  return dlopen((path.substr(0, path.rfind('/') + 1) + "libcaffe2_nvrtc.so").c_str(), RTLD_LAZY | RTLD_LOCAL);
}

Cuda open_cuda() {
  Cuda cuda;
  void* library = open_library();
  if (library == nullptr) {
    return cuda;
  }
  bool all = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    all = all && function != nullptr;
  };
#define ATTN_EXT_FIND(name) find(cuda.name, #name)
  ATTN_EXT_FIND(cuCtxGetCurrent);
  ATTN_EXT_FIND(cuCtxSetCurrent);
  ATTN_EXT_FIND(cuDevicePrimaryCtxRetain);
  ATTN_EXT_FIND(nvrtcGetNumSupportedArchs);
  ATTN_EXT_FIND(nvrtcGetSupportedArchs);
  ATTN_EXT_FIND(cuModuleLoadData);
  ATTN_EXT_FIND(cuModuleGetFunction);
  ATTN_EXT_FIND(cuFuncSetAttribute);
  ATTN_EXT_FIND(cuLaunchKernel);
  ATTN_EXT_FIND(cuDeviceGetAttribute);
  ATTN_EXT_FIND(cuGetErrorString);
  ATTN_EXT_FIND(nvrtcCreateProgram);
  ATTN_EXT_FIND(nvrtcCompileProgram);
  ATTN_EXT_FIND(nvrtcGetCUBINSize);
  ATTN_EXT_FIND(nvrtcGetCUBIN);
  ATTN_EXT_FIND(nvrtcGetProgramLogSize);
  ATTN_EXT_FIND(nvrtcGetProgramLog);
  ATTN_EXT_FIND(nvrtcDestroyProgram);
#undef ATTN_EXT_FIND
  cuda.is_complete = all;
  return cuda;
}

const Cuda& cuda() {
  static const Cuda opened = open_cuda();
  return opened;
}

void check(int result) {
  if (result != 0) {
    const char* text = "unknown error";
    cuda().cuGetErrorString(result, &text);
    TORCH_CHECK(false, "attn_ext: CUDA says: ", text);
  }
}

int attribute_of(c10::Device device, int attribute) {
  int value = 0;
  check(cuda().cuDeviceGetAttribute(&value, attribute, device.index()));
  return value;
}

/// As in sm_90.
int capability_of(c10::Device device) {
  return 10 * attribute_of(device, kMajor) + attribute_of(device, kMinor);
}

/// Those that the compiler knows.
std::vector<int> known_capabilities() {
  int count = 0;
  if (cuda().nvrtcGetNumSupportedArchs(&count) != 0) {
    return {};
  }
  std::vector<int> known(static_cast<size_t>(count));
  return cuda().nvrtcGetSupportedArchs(known.data()) == 0 ? known : std::vector<int>();
}

/// A thread that has done nothing on the device yet has no context of it.
void enter_context(c10::Device device) {
  void* context = nullptr;
  check(cuda().cuCtxGetCurrent(&context));
  if (context == nullptr) {
    check(cuda().cuDevicePrimaryCtxRetain(&context, device.index()));
    check(cuda().cuCtxSetCurrent(context));
  }
}

std::vector<char> compile(const TileDims& dims, bool with_gradients, c10::Device device) {
  const std::vector<std::string> options{
      "--gpu-architecture=sm_" + std::to_string(capability_of(device)),
      "--std=c++17",
      "--device-as-default-execution-space",
      "-DHEAD_DIM=" + std::to_string(dims.head_dim),
      "-DVALUE_DIM=" + std::to_string(dims.value_dim),
      "-DIS_BFLOAT16=" + std::to_string(dims.dtype == c10::ScalarType::BFloat16),
      "-DWITH_GRADIENTS=" + std::to_string(with_gradients)};
  std::vector<const char*> texts;
  for (const std::string& option : options) {
    texts.push_back(option.c_str());
  }
  void* program = nullptr;
  TORCH_CHECK(cuda().nvrtcCreateProgram(&program, kWeightsSource, "weights.cu", 0, nullptr, nullptr) == 0,
              "attn_ext: CUDA's run-time compiler cannot be used");
  size_t size = 0;
  if (cuda().nvrtcCompileProgram(program, static_cast<int>(texts.size()), texts.data()) != 0) {
    cuda().nvrtcGetProgramLogSize(program, &size);
    std::string log(size, ' ');
    cuda().nvrtcGetProgramLog(program, log.data());
    cuda().nvrtcDestroyProgram(&program);
    TORCH_CHECK(false, "attn_ext: CUDA's run-time compiler refuses weights.cu:\n", log);
  }
  cuda().nvrtcGetCUBINSize(program, &size);
  std::vector<char> cubin(size);
  cuda().nvrtcGetCUBIN(program, cubin.data());
  cuda().nvrtcDestroyProgram(&program);
  return cubin;
}

size_t tile_bytes(int64_t columns) {
  return static_cast<size_t>(kTileRows * (columns + kPad)) * sizeof(u16);
}

/// The tiles, over which what is stored is laid out again.
size_t weights_bytes(const TileDims& dims, bool with_gradients) {
  const size_t tiles = 2 * tile_bytes(dims.head_dim) + (with_gradients ? 2 * tile_bytes(dims.value_dim) : 0);
  return std::max(tiles, tile_bytes(kTileKeys));
}

struct Functions {
  void *row_sums, *weights;
  unsigned row_sums_bytes, weights_bytes;  // of shared memory
};

Functions load(const TileDims& dims, bool with_gradients, c10::Device device) {
  const std::vector<char> cubin = compile(dims, with_gradients, device);
  void* module = nullptr;
  check(cuda().cuModuleLoadData(&module, cubin.data()));
  Functions functions{};
  check(cuda().cuModuleGetFunction(&functions.row_sums, module, "row_sums"));
  check(cuda().cuModuleGetFunction(&functions.weights, module, "weights"));
  functions.row_sums_bytes = static_cast<unsigned>(2 * tile_bytes(dims.head_dim));
  functions.weights_bytes = static_cast<unsigned>(weights_bytes(dims, with_gradients));
  check(cuda().cuFuncSetAttribute(functions.row_sums, kDynamicSharedBytes,
                                  static_cast<int>(functions.row_sums_bytes)));
  check(cuda().cuFuncSetAttribute(functions.weights, kDynamicSharedBytes,
                                  static_cast<int>(functions.weights_bytes)));
  return functions;
}

const Functions& functions_of(const TileDims& dims, bool with_gradients, c10::Device device) {
  using Key = std::tuple<int, int64_t, int64_t, c10::ScalarType, bool>;
  static std::mutex mutex;
  static auto& loaded = *new std::map<Key, Functions>();  // the driver may be gone when the process ends
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key{device.index(), dims.head_dim, dims.value_dim, dims.dtype, with_gradients};
  const auto found = loaded.find(key);
  return found != loaded.end() ? found->second
                               : loaded.emplace(key, load(dims, with_gradients, device)).first->second;
}

void launch(void* function, unsigned shared_bytes, int64_t x, int64_t y, int64_t z,
            const WeightsParams& params, c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  void* stream = guard.getStream(device).native_handle();
  void* parameters[] = {const_cast<WeightsParams*>(&params)};
  check(cuda().cuLaunchKernel(function, static_cast<unsigned>(x), static_cast<unsigned>(y),
                              static_cast<unsigned>(z), kThreads, 1, 1, shared_bytes, stream, parameters,
                              nullptr));
}

int64_t tiles(int64_t length, int64_t tile) {
  return (length + tile - 1) / tile;
}

}  // namespace

bool has_tile_kernels(const TileDims& dims, bool with_gradients, c10::Device device) {
  constexpr int kFirst = 80;  // with mma of bfloat16 and asynchronous copies
  if (!device.is_cuda() || !cuda().is_complete) {
    return false;
  }
  static const std::vector<int> known = known_capabilities();
  const int capability = capability_of(device);
  return capability >= kFirst && std::find(known.begin(), known.end(), capability) != known.end() &&
         static_cast<size_t>(attribute_of(device, kMostSharedBytes)) >= weights_bytes(dims, with_gradients);
}

void launch_row_sums(const WeightsParams& params, const TileDims& dims, int64_t heads, c10::Device device) {
  const c10::DeviceGuard guard(device);
  enter_context(device);
  const Functions& functions = functions_of(dims, /*with_gradients=*/false, device);
  launch(functions.row_sums, functions.row_sums_bytes, 1, tiles(params.query_len, kTileRows), heads, params,
         device);
}

void launch_weights(const WeightsParams& params, const TileDims& dims, int64_t heads, c10::Device device) {
  const c10::DeviceGuard guard(device);
  enter_context(device);
  const Functions& functions = functions_of(dims, params.delta != nullptr, device);
  launch(functions.weights, functions.weights_bytes, tiles(params.key_len, kTileKeys),
         tiles(params.rows, kTileRows), heads, params, device);
}

}  // namespace attn_ext::cuda

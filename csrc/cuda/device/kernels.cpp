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

#include "sources.h"

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

// Attributes of a device.
constexpr int kProcessors = 16, kMajor = 75, kMinor = 76, kMostSharedBytes = 97;
constexpr int kDynamicSharedBytes = 8;            // of a function
constexpr int kPassing = 64, kThreadsOfLine = 2;  // as in numbers.cu
constexpr int kPad = 8;                           // as in mma.cu

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

struct Source {
  const char *name, *text;  // `name` is that of the kernel in it
};

Source source_of(TileKernel kernel) {
  switch (kernel) {
    case TileKernel::kAttend:
      return {"attend", sources::kAttend};
    case TileKernel::kMerge:
      return {"merge", sources::kMerge};
    case TileKernel::kDraws:
      return {"draws", sources::kDraws};
    case TileKernel::kWeights:
      return {"weights", sources::kWeights};
    case TileKernel::kGradQuery:
      return {"grad_query", sources::kGradQuery};
    case TileKernel::kGradKeys:
      return {"grad_keys", sources::kGradKeys};
  }
  TORCH_INTERNAL_ASSERT(false);
}

/// How a kernel is made for a device.
struct Variant {
  bool has_wgmma;  // Hopper's products
  int buffers;     // for keys and values that attend.cu reads
  int held;        // lines of a block
};

std::vector<char> compile(const Source& source, const TileDims& dims, const Variant& variant,
                          c10::Device device) {
  const std::vector<std::string> options{
      "--gpu-architecture=sm_" + std::to_string(capability_of(device)) + (variant.has_wgmma ? "a" : ""),
      "--std=c++17",
      "--device-as-default-execution-space",
      "-DHEAD_DIM=" + std::to_string(dims.head_dim),
      "-DVALUE_DIM=" + std::to_string(dims.value_dim),
      "-DIS_BFLOAT16=" + std::to_string(dims.dtype == c10::ScalarType::BFloat16),
      "-DBUFFERS=" + std::to_string(variant.buffers),
      "-DHELD=" + std::to_string(variant.held),
      "-DWITH_DROPOUT=" + std::to_string(dims.has_dropout)};
  std::vector<const char*> texts;
  for (const std::string& option : options) {
    texts.push_back(option.c_str());
  }
  const std::string name = std::string(source.name) + ".cu",
                    text = std::string(sources::kBeforeProducts) +
                           (variant.has_wgmma ? sources::kWgmma : sources::kMma) + sources::kAfterProducts +
                           source.text;
  void* program = nullptr;
  TORCH_CHECK(cuda().nvrtcCreateProgram(&program, text.c_str(), name.c_str(), 0, nullptr, nullptr) == 0,
              "attn_ext: CUDA's run-time compiler cannot be used");
  size_t size = 0;
  if (cuda().nvrtcCompileProgram(program, static_cast<int>(texts.size()), texts.data()) != 0) {
    cuda().nvrtcGetProgramLogSize(program, &size);
    std::string log(size, ' ');
    cuda().nvrtcGetProgramLog(program, log.data());
    cuda().nvrtcDestroyProgram(&program);
    TORCH_CHECK(false, "attn_ext: CUDA's run-time compiler refuses ", name, ":\n", log);
  }
  cuda().nvrtcGetCUBINSize(program, &size);
  std::vector<char> cubin(size);
  cuda().nvrtcGetCUBIN(program, cubin.data());
  cuda().nvrtcDestroyProgram(&program);
  return cubin;
}

/// Of shared memory.
size_t bytes_of(TileKernel kernel, const TileDims& dims, const Variant& variant) {
  const auto tile = [&](int64_t lines, int64_t columns) {
    return static_cast<size_t>(lines * (columns + (variant.has_wgmma ? 0 : kPad))) * sizeof(u16);
  };
  const size_t held = tile(variant.held, dims.head_dim), held_values = tile(variant.held, dims.value_dim);
  const size_t passing = tile(kPassing, dims.head_dim), passing_values = tile(kPassing, dims.value_dim);
  switch (kernel) {
    case TileKernel::kAttend:
      return held + static_cast<size_t>(variant.buffers) * (passing + passing_values);
    case TileKernel::kMerge:
      return 0;
    case TileKernel::kDraws:  // a word of each thread
      return static_cast<size_t>(variant.held) * kThreadsOfLine * sizeof(u32);
    case TileKernel::kWeights:
      return held + 2 * passing;
    case TileKernel::kGradQuery:
      return held + held_values + 2 * (passing + passing_values);
    case TileKernel::kGradKeys: {  // with two numbers of each row
      const size_t rows = 2 * kPassing * sizeof(float);
      return held + held_values + 2 * (passing + passing_values + rows);
    }
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool fits(TileKernel kernel, const TileDims& dims, const Variant& variant, c10::Device device) {
  return static_cast<size_t>(attribute_of(device, kMostSharedBytes)) >= bytes_of(kernel, dims, variant);
}

Variant variant_of(TileKernel kernel, const TileDims& dims, c10::Device device) {
  constexpr int kHopper = 90, kPanel = 64;
  const bool has_wgmma =
      capability_of(device) == kHopper && dims.head_dim % kPanel == 0 && dims.value_dim % kPanel == 0;
  // Two blocks of half the lines, which take turns with the matrix unit, are faster on Hopper by 7 to 26 %.
  const bool is_grad = kernel == TileKernel::kGradQuery || kernel == TileKernel::kGradKeys;
  const int held = is_grad && has_wgmma ? 64 : 128;
  Variant variant{.has_wgmma = has_wgmma, .buffers = 2, .held = held};
  if (!fits(kernel, dims, variant, device)) {
    variant.buffers = 1;
  }
  return variant;
}

struct Function {
  void* function;
  unsigned shared_bytes, threads;
};

Function load(TileKernel kernel, const TileDims& dims, c10::Device device) {
  const Source source = source_of(kernel);
  const Variant variant = variant_of(kernel, dims, device);
  const std::vector<char> cubin = compile(source, dims, variant, device);
  void* module = nullptr;
  check(cuda().cuModuleLoadData(&module, cubin.data()));
  Function loaded{nullptr, static_cast<unsigned>(bytes_of(kernel, dims, variant)),
                  static_cast<unsigned>(variant.held * kThreadsOfLine)};
  check(cuda().cuModuleGetFunction(&loaded.function, module, source.name));
  check(
      cuda().cuFuncSetAttribute(loaded.function, kDynamicSharedBytes, static_cast<int>(loaded.shared_bytes)));
  return loaded;
}

const Function& function_of(TileKernel kernel, const TileDims& dims, c10::Device device) {
  using Key = std::tuple<TileKernel, int, int64_t, int64_t, c10::ScalarType, bool>;
  static std::mutex mutex;
  static auto& loaded = *new std::map<Key, Function>();  // the driver may be gone when the process ends
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key{kernel, device.index(), dims.head_dim, dims.value_dim, dims.dtype, dims.has_dropout};
  const auto found = loaded.find(key);
  return found != loaded.end() ? found->second
                               : loaded.emplace(key, load(kernel, dims, device)).first->second;
}

}  // namespace

bool has_tile_kernel(TileKernel kernel, const TileDims& dims, c10::Device device) {
  constexpr int kFirst = 80;  // with mma of bfloat16 and asynchronous copies
  if (!device.is_cuda() || !cuda().is_complete) {
    return false;
  }
  static const std::vector<int> known = known_capabilities();
  const int capability = capability_of(device);
  return capability >= kFirst && std::find(known.begin(), known.end(), capability) != known.end() &&
         fits(kernel, dims, variant_of(kernel, dims, device), device);
}

int64_t processors_of(c10::Device device) {
  return attribute_of(device, kProcessors);
}

int64_t lines_held(TileKernel kernel, const TileDims& dims, c10::Device device) {
  return variant_of(kernel, dims, device).held;
}

void launch_tile_kernel(TileKernel kernel, const TileParams& params, const TileDims& dims,
                        const TileGrid& grid, c10::Device device) {
  const c10::DeviceGuard device_guard(device);
  enter_context(device);
  const Function& function = function_of(kernel, dims, device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  void* stream = guard.getStream(device).native_handle();
  void* parameters[] = {const_cast<TileParams*>(&params)};
  check(cuda().cuLaunchKernel(function.function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                              static_cast<unsigned>(grid.z), function.threads, 1, 1, function.shared_bytes,
                              stream, parameters, nullptr));
}

}  // namespace attn_ext::cuda

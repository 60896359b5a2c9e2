// Which of its fused kernels ATen would choose. Asking takes as long as handing out a short kernel, so that
// the last answers are kept.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_sdp_choice.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>

#include "route.h"

namespace attn_ext::cuda {

/// The last answers, by their questions.
template <class Question, class Answer, size_t count>
class Recent {
 public:
  /// nullptr: not kept.
  const Answer* find(const Question& question) const {
    for (size_t place = 0; place < kept_; ++place) {
      if (entries_[place].question == question) {
        return &entries_[place].answer;
      }
    }
    return nullptr;
  }

  /// In the place of the oldest.
  void keep(const Question& question, const Answer& answer) {
    entries_[next_] = {question, answer};
    kept_ = std::max(kept_, next_ + 1);
    next_ = (next_ + 1) % count;
  }

 private:
  struct Entry {
    Question question;
    Answer answer;
  };
  std::array<Entry, count> entries_{};
  size_t kept_ = 0, next_ = 0;
};

struct ChoiceRequest {
  const at::Tensor &query, &key, &value;  // four dims
  bool has_mask, is_causal;
  bool trains;  // a backward pass follows, or is this
};

/// Everything that the answer depends on.
class ChoiceKey {
 public:
  explicit ChoiceKey(const ChoiceRequest& request) {
    for (const at::Tensor* tensor : {&request.query, &request.key, &request.value}) {
      add(tensor->sizes());
      add(tensor->strides());
      add(tensor->storage_offset() * static_cast<int64_t>(tensor->element_size()) % 16);
    }
    add(static_cast<int64_t>(request.query.scalar_type()));
    add(request.query.device().index());
    auto& context = at::globalContext();
    int64_t switches = 0;
    for (const bool is_on :
         {request.has_mask, request.is_causal, request.trains, context.userEnabledFlashSDP(),
          context.userEnabledMemEfficientSDP(), context.userEnabledCuDNNSDP(), context.userEnabledMathSDP(),
          context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly()}) {
      switches = 2 * switches + (is_on ? 1 : 0);
    }
    add(switches);
    for (const at::SDPBackend backend : context.sDPPriorityOrder()) {
      add(static_cast<int64_t>(backend));
    }
  }
  ChoiceKey() = default;

  bool operator==(const ChoiceKey& other) const { return numbers_ == other.numbers_; }

 private:
  static constexpr size_t kNumbers = 3 * 9 + 3 + at::num_sdp_backends;

  void add(int64_t number) { numbers_[added_++] = number; }
  void add(at::IntArrayRef numbers) {
    for (const int64_t number : numbers) {
      add(number);
    }
  }

  std::array<int64_t, kNumbers> numbers_{};
  size_t added_ = 0;
};

/// By ATen itself, with no mask but the request's. Nothing where it throws: if none may be that the user
/// allows, of which `math` is not one.
inline std::optional<Backend> ask_aten(const ChoiceRequest& request) {
  at::Tensor query = request.query;
  const at::AutoGradMode grad_mode(request.trains);
  if (request.trains && !query.requires_grad()) {
    query = query.detach().set_requires_grad(true);
  }
  // What the choice asks of a mask: whether there is one, that it broadcasts, and its last stride.
  std::optional<at::Tensor> mask;
  if (request.has_mask) {
    mask = request.query.detach().as_strided({1, 1}, {1, 1});
  }
  try {
    const int64_t choice =
        at::_fused_sdp_choice(query, request.key, request.value, mask, /*dropout_p=*/0.0, request.is_causal,
                              /*scale=*/std::nullopt,
                              /*enable_gqa=*/request.key.size(1) != request.query.size(1));
    const bool is_known = choice > 0 && choice <= static_cast<int64_t>(Backend::kCudnn);
    return is_known ? static_cast<Backend>(choice) : Backend::kComposition;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

/// As ask_aten, which on a GPU answers the same whenever it is asked the same.
inline Backend choice_of_aten(const ChoiceRequest& request) {
  const c10::DispatchKeySet keys = request.query.key_set();
  const bool is_plain = keys.has(c10::DispatchKey::CUDA) && !keys.has(c10::DispatchKey::Python);
  thread_local Recent<ChoiceKey, Backend, 16> recent;
  const Backend* const known = is_plain ? recent.find(ChoiceKey(request)) : nullptr;
  if (known != nullptr) {
    return *known;
  }
  const std::optional<Backend> answer = ask_aten(request);
  if (is_plain && answer) {
    // Asked for the first time, ATen sets an order of its own: the key is what it is now.
    recent.keep(ChoiceKey(request), *answer);
  }
  return answer.value_or(Backend::kComposition);
}

}  // namespace attn_ext::cuda

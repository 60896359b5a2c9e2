#include "route.h"

#include <algorithm>

namespace attn_ext::cuda {

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kFlash:
      return "flash";
    case Backend::kEfficient:
      return "efficient";
    case Backend::kCudnn:
      return "cudnn";
    case Backend::kTiles:
      return "tiles";
    default:
      return "aten";
  }
}

namespace {

BandKind kind_of(const Band& band, int64_t query_len, int64_t key_len) {
  if (!band.low && !band.high) {
    return BandKind::kAll;
  }
  if (band.low) {
    return BandKind::kWindow;
  }
  return *band.high == 0                     ? BandKind::kCausal
         : *band.high == key_len - query_len ? BandKind::kCausalAtEnd
                                             : BandKind::kWindow;
}

}  // namespace

VisibleRange visible_range(const Band& band, int64_t query_len, int64_t key_len) {
  VisibleRange range{0, key_len, band, BandKind::kNothing, 0, query_len};
  if (band.low) {
    range.key_begin = std::clamp<int64_t>(*band.low, 0, key_len);
  }
  if (band.high) {
    range.key_end = std::clamp<int64_t>(query_len + *band.high, 0, key_len);
  }
  const int64_t keys = range.keys();
  if (query_len == 0 || keys <= 0) {
    range.first_seeing_row = query_len;
    return range;
  }
  if (range.band.low) {
    *range.band.low -= range.key_begin;
    range.end_of_seeing_rows = std::clamp<int64_t>(keys - *range.band.low, 0, query_len);
    if (*range.band.low + query_len - 1 <= 0) {
      range.band.low.reset();
    }
  }
  if (range.band.high) {
    *range.band.high -= range.key_begin;
    range.first_seeing_row = std::clamp<int64_t>(-*range.band.high, 0, query_len);
    if (*range.band.high >= keys - 1) {
      range.band.high.reset();
    }
  }
  range.kind = range.first_seeing_row < range.end_of_seeing_rows ? kind_of(range.band, query_len, keys)
                                                                 : BandKind::kNothing;
  return range;
}

std::optional<FlashWindow> flash_window(const VisibleRange& range, int64_t query_len) {
  const int64_t keys = range.keys(), shift = keys - query_len;
  FlashWindow window;
  if (range.band.low) {
    window.left = shift - *range.band.low;
    if (window.left < 0) {
      return std::nullopt;
    }
  }
  if (range.band.high) {
    window.right = *range.band.high - shift;
    if (window.right < 0 || window.right >= keys) {  // which the kernels would take as open
      return std::nullopt;
    }
  } else if (range.band.low && shift < -1) {  // beside a left side an open right one ends at `keys`
    return std::nullopt;
  }
  return window;
}

std::optional<EfficientMask> efficient_mask(const VisibleRange& range, int64_t query_len, bool is_backward) {
  if (range.kind == BandKind::kAll) {
    return EfficientMask{};
  }
  if (!range.band.high || range.has_blind_rows(query_len) || (is_backward && range.band.low)) {
    return std::nullopt;
  }
  const int64_t shift = range.keys() - query_len;
  EfficientMask mask;
  if (*range.band.high == 0) {
    mask.type = 1;
  } else if (*range.band.high == shift) {
    mask.type = 2;
  } else {
    return std::nullopt;
  }
  if (range.band.low) {
    mask.window = *range.band.high - *range.band.low + 1;
  }
  return mask;
}

Backend route(const RouteRequest& request, Backend choice, bool flash_is_enabled, bool efficient_is_enabled) {
  // The efficient kernel alone hands back the gradient of a bias.
  if (request.wants_bias_grad) {
    return choice != Backend::kComposition && efficient_is_enabled ? Backend::kEfficient
                                                                   : Backend::kComposition;
  }
  if (request.has_bias || request.kind == BandKind::kAll || request.kind == BandKind::kCausal) {
    return choice;
  }
  // cuDNN and flash attention ask the same of a GPU and of the tensors.
  const bool may_flash = flash_is_enabled && (choice == Backend::kFlash || choice == Backend::kCudnn);
  if (may_flash && request.has_flash_window) {
    return Backend::kFlash;
  }
  const bool may_be_efficient = efficient_is_enabled && choice != Backend::kComposition;
  return may_be_efficient && request.has_efficient_mask ? Backend::kEfficient : Backend::kComposition;
}

}  // namespace attn_ext::cuda

#include "plan.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <c10/util/accumulate.h>

#include <cmath>

#include "bias.h"
#include "choice.h"
#include "device/kernels.h"

namespace attn_ext::cuda {

namespace {

constexpr int64_t kMostGridBlocks = 65535;  // in the dims of a grid that count N and H
constexpr int64_t kFlashDims = 256;
constexpr int64_t kFewRows = 32;  // below, repeated keys cost the backward pass more than many small launches
// Of the efficient kernel, one for each head of few rows: they leave half of a large GPU idle, which costs
// more than what many small launches cost where each has many keys.
constexpr int64_t kFewBlocks = 64, kManyKeys = 1024;
// Elements of a bias that may be made larger than its mask, by a band that is put into it, or of a gradient
// that is larger: what one chunk of the composition holds.
constexpr int64_t kMostMadeElements = int64_t{1} << 24;

bool holds_nothing(const SdpaArgs& args, const Problem& problem) {
  return problem.query_len == 0 || problem.key_len == 0 || problem.head_dim == 0 || problem.value_dim == 0 ||
         args.query.numel() == 0 || args.key.numel() == 0 || args.value.numel() == 0;
}

/// Why the call cannot go to any of ATen's kernels; nothing if it may.
const char* why_composed(const SdpaArgs& args, const Problem& problem, const Purpose& purpose) {
  if (at::globalContext().hasROCM()) {
    return "an AMD GPU, on which none of the kernels was tried";
  }
  if (problem.dropout_p > 0.0) {
    return "dropout: the fused kernels draw other numbers";
  }
  if (problem.softcap > 0.0) {
    return "softcap, which the fused kernels do not have";
  }
  if (purpose.sides.weights || purpose.sides.key_mass || purpose.takes_grads_of_sides) {
    return "weights or key mass, which the fused kernels do not return";
  }
  if (args.unrounded || purpose.has_delta) {
    return "a part of a call, whose results are not rounded";
  }
  if (!is_half(problem.dtype) && problem.dtype != at::kFloat) {
    return "dtype Double";
  }
  if (!(problem.scale > 0.0 && problem.scale < kInfinity)) {
    return "a scale that is not positive and finite";
  }
  if (args.attn_mask.defined() && args.attn_mask.scalar_type() != at::kBool &&
      args.attn_mask.scalar_type() != problem.dtype) {
    return "attn_mask of dtype Float beside a query of another: the fused kernels take that of the query, to "
           "which attn_mask.to(query.dtype) would round it";
  }
  if (purpose.takes_lse_grad && problem.dtype == at::kHalf) {
    return "a gradient of lse beside float16, whose range it may leave";
  }
  if (holds_nothing(args, problem)) {
    return "nothing to attend to";
  }
  return nullptr;
}

/// cuDNN's output, if it has other columns than the query, lies as the query does, dims of smaller strides
/// inside: a dim that is broadcast would come between its columns, which cuDNN refuses.
bool misleads_cudnn(const FusedCall& call) {
  const auto is_inside = [&](int64_t dim) { return call.query.size(dim) > 1 && call.query.stride(dim) <= 1; };
  return call.query.size(-1) != call.value.size(-1) && (is_inside(0) || is_inside(1) || is_inside(2));
}

/// What makes a plan, step by step.
class Planner {
 public:
  Planner(const SdpaArgs& args, const Purpose& purpose)
      : args_(args), purpose_(purpose), plan_{{}, describe(args)} {}

  Plan make() {
    const char* reason = why_composed(args_, plan_.problem, purpose_);
    if (reason == nullptr) {
      reason = try_fused();
    }
    if (reason == nullptr) {
      plan_.backend = plan_.call.backend;
    } else {
      plan_.call = {};
      plan_.reason = reason;
      if (may_go_by_tiles() && view_tiles()) {
        plan_.backend = Backend::kTiles;
      }
    }
    return std::move(plan_);
  }

 private:
  static constexpr const char* kNoView = "batch dims whose tensors would have to be copied to broadcast them";
  static constexpr const char* kNoKernel =
      "no fused kernel takes these shapes, dtypes and masks, or those that "
      "do are switched off (torch.nn.attention.sdpa_kernel)";

  /// Why it cannot be; nullptr if the plan is made.
  const char* try_fused() {
    const Problem& problem = plan_.problem;
    plan_.call.range = visible_range(problem.band, problem.query_len, problem.key_len);
    plan_.call.scale = problem.scale;
    plan_.call.wants_lse = purpose_.wants_lse;
    if (plan_.call.range.kind == BandKind::kNothing) {
      return "no row sees a key";
    }
    if (args_.attn_mask.defined()) {
      if (const char* reason = take_mask()) {
        return reason;
      }
    }
    const auto batch_dims = static_cast<size_t>(problem.layout.batch_dims);
    if (!view(batch_dims)) {
      return kNoView;
    }
    Backend backend = choose();
    const bool lacks_groups = backend == Backend::kComposition || backend == Backend::kEfficient;
    if (problem.layout.group > 1 && lacks_groups) {
      if (purpose_.is_backward && has_few_grouped_rows()) {
        return "few rows of grouped heads, whose keys the fused kernels would have repeated";
      }
      if (!view(batch_dims + 1)) {
        return kNoView;
      }
      backend = choose();
      if (backend == Backend::kEfficient && problem.dtype == at::kFloat && has_few_grouped_rows() &&
          c10::multiply_integers(problem.lead) < kFewBlocks && plan_.call.range.keys() >= kManyKeys) {
        return "few rows of few grouped heads in float32, which leave most of a GPU idle in a fused kernel";
      }
    }
    // Flash attention alone has most windows, and wants both head dims to be the same.
    const bool is_window =
        plan_.call.range.kind != BandKind::kAll && plan_.call.range.kind != BandKind::kCausal;
    if (backend == Backend::kComposition && is_window && is_half(problem.dtype) &&
        plan_.call.query.size(-1) != plan_.call.value.size(-1) && make_dims_equal()) {
      backend = choose();
    }
    if (backend == Backend::kEfficient && heads_lie_outside() && view_if_it_fits(batch_dims + 2)) {
      backend = choose();
    }
    if (backend == Backend::kComposition || (backend == Backend::kFlash && !make_dims_equal())) {
      return kNoKernel;
    }
    const auto [batches, heads] = plan_.dims.sizes();
    if (batches > kMostGridBlocks || heads > kMostGridBlocks) {
      return "more heads than a grid has blocks";
    }
    plan_.call.backend = backend;
    if (backend == Backend::kCudnn && misleads_cudnn(plan_.call)) {
      plan_.call.query = plan_.call.query.contiguous();
    }
    if (has_mask_) {
      return make_bias_of(backend) ? nullptr : kNoView;
    }
    return nullptr;
  }

  bool may_go_by_tiles() const {
    const Problem& problem = plan_.problem;
    const auto& context = at::globalContext();
    const bool is_wanted = context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() ||
                           context.userEnabledCuDNNSDP();
    const bool is_part = args_.unrounded || purpose_.has_delta || args_.dropout_origin.has_value();
    const bool is_drawn_once = problem.dropout_p == 0.0 || args_.dropout_seed.dim() == 0;
    return is_wanted && !is_part && is_drawn_once && is_half(problem.dtype) &&
           !purpose_.takes_grads_of_sides && !purpose_.wants_bias_grad && std::isfinite(problem.scale) &&
           !holds_nothing(args_, problem) && std::max(problem.head_dim, problem.value_dim) <= kTileDims &&
           c10::multiply_integers(problem.lead) <= kMostGridBlocks &&
           problem.query_len <= kMostGridBlocks * kTileDimsStep &&
           has_tiles(args_.query, rounded_up(problem.head_dim, kTileDimsStep),
                     rounded_up(problem.value_dim, kTileDimsStep), purpose_.is_backward);
  }

  bool view_tiles() {
    const Problem& problem = plan_.problem;
    TileCall& tiles = plan_.tiles;
    plan_.dims = {problem.layout, problem.lead, static_cast<size_t>(problem.layout.batch_dims)};
    const int64_t dims = rounded_up(problem.head_dim, kTileDimsStep);
    const auto query = plan_.dims.query_view(aligned(args_.query, dims));
    const auto key = plan_.dims.key_view(aligned(args_.key, dims));
    const auto value =
        plan_.dims.key_view(aligned(args_.value, rounded_up(problem.value_dim, kTileDimsStep)));
    if (!query || !key || !value) {
      return false;
    }
    if (args_.attn_mask.defined()) {
      const at::Tensor mask = problem.layout.of_query_heads(args_.attn_mask, 2);
      const auto whole = plan_.dims.view(mask.expand(mask_sizes(mask, problem.key_len)));
      if (!whole) {
        return false;
      }
      tiles.mask = *whole;
    }
    tiles.query = with_row_strides(*query, query->size(-1));
    tiles.key = with_row_strides(*key, key->size(-1));
    tiles.value = with_row_strides(*value, value->size(-1));
    tiles.seed = problem.dropout_p > 0.0 ? args_.dropout_seed : at::Tensor();
    tiles.low = problem.band.low.value_or(-kFar);
    tiles.high = problem.band.high.value_or(kFar);
    tiles.scale = problem.scale;
    tiles.softcap = problem.softcap;
    tiles.dropout_p = problem.dropout_p;
    tiles.first_batch = args_.first_batch;
    tiles.batch_step = args_.batch_step;
    return true;
  }

  /// The mask, with the band in it; the range has none then.
  const char* take_mask() {
    const Problem& problem = plan_.problem;
    VisibleRange& range = plan_.call.range;
    has_mask_ = true;
    int64_t lead = 1;
    for (int64_t dim = 0; dim + 2 < args_.attn_mask.dim(); ++dim) {
      lead *= args_.attn_mask.size(dim);
    }
    if (range.kind != BandKind::kAll) {
      if (lead * problem.query_len * range.keys() > kMostMadeElements) {
        return "attn_mask beside a window or is_causal, too large to be made one bias";
      }
      visible_ = visible_by(range, problem.query_len, args_.attn_mask.options());
      range.band = {};
      range.kind = BandKind::kAll;
      range.first_seeing_row = 0;
      range.end_of_seeing_rows = problem.query_len;
    }
    return purpose_.wants_bias_grad ? why_no_bias_grad() : nullptr;
  }

  bool has_few_grouped_rows() const {
    return plan_.problem.layout.group > 1 && plan_.problem.query_len < kFewRows;
  }

  /// Why no fused kernel is to make the gradient of attn_mask; nullptr if one may.
  const char* why_no_bias_grad() const {
    const Problem& problem = plan_.problem;
    const VisibleRange& range = plan_.call.range;
    const int64_t scores = c10::multiply_integers(problem.lead) * problem.query_len * range.keys();
    const bool is_summed =
        ((args_.attn_mask.dim() == 0 || args_.attn_mask.size(-1) == 1) && range.keys() > 1) ||
        ((args_.attn_mask.dim() < 2 || args_.attn_mask.size(-2) == 1) && problem.query_len > 1);
    if (is_summed && is_half(problem.dtype)) {
      return "the gradient of an attn_mask that many rows or keys share, which the fused kernels round "
             "before it is summed";
    }
    if (scores > std::max(4 * args_.attn_mask.numel(), kMostMadeElements)) {
      return "the gradient of attn_mask, which the fused kernels make of the size of all scores";
    }
    return nullptr;
  }

  /// Query, key and value with the first `batches` lead dims in N; false if that is no view.
  bool view(size_t batches) {
    const Problem& problem = plan_.problem;
    FusedCall& call = plan_.call;
    plan_.dims = {problem.layout, problem.lead, batches};
    const VisibleRange& range = call.range;
    const auto narrowed = [&](const at::Tensor& tensor) {
      return range.keys() == problem.key_len ? tensor : tensor.narrow(-2, range.key_begin, range.keys());
    };
    // Laid out anew before they are broadcast.
    const int64_t step = is_half(problem.dtype) ? 8 : 4;
    const int64_t dims = rounded_up(problem.head_dim, step);
    const at::Tensor values = narrowed(args_.value);
    const auto query = plan_.dims.query_view(aligned(args_.query, dims));
    const auto key = plan_.dims.key_view(aligned(narrowed(args_.key), dims));
    const auto value = plan_.dims.key_view(
        purpose_.takes_lse_grad ? with_columns(values, rounded_up(problem.value_dim + kLseColumns, step), 1.0)
                                : aligned(values, rounded_up(problem.value_dim, step)));
    if (!query || !key || !value) {
      return false;
    }
    call.query = with_row_strides(*query, query->size(-1));
    call.key = with_row_strides(*key, key->size(-1));
    call.value = with_row_strides(*value, value->size(-1));
    return true;
  }

  bool view_if_it_fits(size_t batches) {
    Plan before = plan_;
    if (view(batches) && plan_.dims.sizes()[0] <= kMostGridBlocks) {
      if (!has_mask_ || has_view(canonical_mask())) {
        return true;
      }
      if (!visible_.defined() && (canonical_mask().size(-2) == 1 || is_small_beside_results())) {
        spreads_mask_ = true;
        return true;
      }
    }
    plan_ = std::move(before);
    return false;
  }

  /// Whether a mask is no larger, as often as there are heads, than the results that would else be laid out
  /// anew: the output; in the backward pass that again and the gradients of query, key and value.
  bool is_small_beside_results() const {
    return plan_.call.range.keys() <= plan_.call.query.size(-1) * (purpose_.is_backward ? 4 : 1);
  }

  bool has_view(const at::Tensor& mask) const {
    return plan_.dims.view(mask.expand(mask_sizes(mask, plan_.call.range.keys()))).has_value();
  }

  /// (lead or 1, Lq or 1, keys or 1), as it came.
  at::Tensor canonical_mask() const {
    const VisibleRange& range = plan_.call.range;
    const at::Tensor mask = plan_.problem.layout.of_query_heads(args_.attn_mask, 2);
    const at::Tensor narrowed = mask.size(-1) == 1 || range.keys() == plan_.problem.key_len
                                    ? mask
                                    : mask.narrow(-1, range.key_begin, range.keys());
    if (!spreads_mask_) {
      return narrowed;
    }
    at::DimVector sizes(plan_.problem.lead.begin(), plan_.problem.lead.end());
    sizes.push_back(narrowed.size(-2));
    sizes.push_back(narrowed.size(-1));
    return narrowed.expand(sizes);
  }

  /// Of a mask whose rows and keys are all there.
  at::DimVector mask_sizes(const at::Tensor& mask, int64_t keys) const {
    at::DimVector sizes(mask.sizes().begin(), mask.sizes().end());
    sizes[sizes.size() - 2] = plan_.problem.query_len;
    sizes.back() = keys;
    return sizes;
  }

  /// Whether the query has its heads outside of its rows, so that an output in whose memory they lie inside
  /// would have to be laid out anew.
  bool heads_lie_outside() const {
    const at::Tensor& query = plan_.call.query;
    return query.size(1) > 1 && query.size(2) > 1 && query.stride(1) > query.stride(2);
  }

  Backend choose() {
    const FusedCall& call = plan_.call;
    const auto& context = at::globalContext();
    const int64_t dims = std::max(call.query.size(-1), call.value.size(-1));
    const RouteRequest request{
        .kind = call.range.kind,
        .has_flash_window = dims <= kFlashDims && flash_window(call.range, call.query_len()).has_value(),
        .has_efficient_mask = efficient_mask(call.range, call.query_len(), purpose_.is_backward).has_value(),
        .has_bias = has_mask_,
        .wants_bias_grad = purpose_.wants_bias_grad};
    return route(request, choice(), context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP());
  }

  Backend choice() const {
    const FusedCall& call = plan_.call;
    const bool trains =
        purpose_.is_backward ||
        (at::GradMode::is_enabled() &&
         (args_.query.requires_grad() || args_.key.requires_grad() || args_.value.requires_grad()));
    return choice_of_aten({.query = call.query,
                           .key = call.key,
                           .value = call.value,
                           .has_mask = has_mask_,
                           .is_causal = call.range.kind == BandKind::kCausal,
                           .trains = trains});
  }

  /// Zeros beside the narrower of the head dims.
  bool make_dims_equal() {
    FusedCall& call = plan_.call;
    const int64_t dims = std::max(call.query.size(-1), call.value.size(-1));
    call.query = aligned(call.query, dims);
    call.key = aligned(call.key, dims);
    call.value = aligned(call.value, dims);
    return dims <= kFlashDims;
  }

  bool make_bias_of(Backend backend) {
    FusedCall& call = plan_.call;
    const BiasRows rows = backend != Backend::kEfficient ? BiasRows::kAnywhere
                          : spreads_mask_                ? BiasRows::kAlignedCopy
                                                         : BiasRows::kAligned;
    const at::Tensor bias =
        make_bias(canonical_mask(), visible_, plan_.problem.dtype, call.range.keys(), rows);
    const auto whole = plan_.dims.view(bias.expand(mask_sizes(bias, call.range.keys())));
    if (!whole) {
      return false;
    }
    call.bias = with_row_strides(*whole, rounded_up(call.range.keys(), kBiasAlignment));
    if (backend == Backend::kEfficient && purpose_.wants_lse) {
      const auto row_max = plan_.dims.view(at::amax(bias, -1, /*keepdim=*/true).expand(mask_sizes(bias, 1)));
      if (!row_max) {
        return false;
      }
      call.row_max = row_max->squeeze(-1);
      call.bias_only_hides = args_.attn_mask.scalar_type() == at::kBool;
    }
    return true;
  }

  const SdpaArgs& args_;
  const Purpose& purpose_;
  Plan plan_;
  bool has_mask_ = false;
  bool spreads_mask_ = false;  // over all heads, by a copy
  at::Tensor visible_;         // (Lq, keys), of a band that goes into the bias
};

}  // namespace

Plan make_plan(const SdpaArgs& args, const Purpose& purpose) {
  return Planner(args, purpose).make();
}

}  // namespace attn_ext::cuda

// Gradients of one chunk, and their sums over the chunks.
//
//   dPd = dO Vᵀ + dW + dMass      dP = dPd ∘ dropout multiplier      delta = rowsum(P ∘ dP)
//   dS = P ∘ (dP - delta + dLse)  dsink = sum over rows of Psink (dLse - delta)
//   dQ = scale · dS K             dK = scale · dSᵀ Q                  dV = Pdᵀ dO          dbias = dS
#pragma once

#include "chunk.h"
#include "contract.h"
#include "pieces.h"

namespace attn_ext {

/// Gradients (or their tangents) of a pass's outputs: of the whole call in the canonical layout, or of a
/// chunk in the dtype of accumulation. Undefined stands for zero.
struct OutputGrads {
  at::Tensor output;    // (lead, rows, Dv)
  at::Tensor lse;       // (lead, rows)
  at::Tensor weights;   // (lead, rows, keys)
  at::Tensor key_mass;  // (lead, keys)
};

OutputGrads canonical_grads(const Problem& problem, const SdpaOutputs& grads);
OutputGrads of_part(const Problem& part, const OutputGrads& grads);
OutputGrads narrow_grads(const Problem& problem, const OutputGrads& grads, const ChunkBounds& bounds);

GivenRows canonical_rows(const Problem& problem, const SavedOutputs& saved);
GivenRows of_part(const Problem& part, const GivenRows& rows);
GivenRows narrow_rows(const GivenRows& rows, const ChunkBounds& bounds);

struct ScoreGrads {
  at::Tensor probabilities;  // dP (lead, rows, keys), 0 where not visible
  at::Tensor delta;          // (lead, rows, 1)
  at::Tensor centred;        // dP - delta + dLse (lead, rows, keys)
  at::Tensor scores;         // dS, with bias and after softcap: the gradient of the bias
  at::Tensor products;       // dS before softcap: the gradient of scale · Q Kᵀ
};

/// dPd = dO Vᵀ + dW + dMass, before dropout and visibility.
at::Tensor applied_weights_grad(const at::Tensor& value, const OutputGrads& grads);

/// `delta` (lead, rows), if it is given.
ScoreGrads score_grads(const Problem& problem, const Chunk& chunk, const OutputGrads& grads,
                       const at::Tensor& delta = {});

// The gradients of one chunk, undefined where a factor is.

/// scale · dS K
at::Tensor query_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& scores,
                      const at::Tensor& key);
/// scale · dSᵀ Q
at::Tensor key_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& scores,
                    const at::Tensor& query);
/// Pdᵀ dO
at::Tensor value_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& weights,
                      const at::Tensor& grad);

/// -(delta) + dLse a row (lead, rows, 1), of which both dS and the gradient of the sinks are made.
at::Tensor row_grads(const at::Tensor& delta, const OutputGrads& grads);

/// The gradients of a part's inputs (or tangents of these), summed over chunks in canonical layout.
class GradientSums {
 public:
  explicit GradientSums(const Problem& problem);

  void add_query(const at::Tensor& grad) { query_.add(grad); }
  void add_key(const at::Tensor& grad, const ChunkBounds& bounds) { key_.add(grad, bounds); }
  void add_value(const at::Tensor& grad, const ChunkBounds& bounds) { value_.add(grad, bounds); }
  /// Of dS (lead, rows, keys): summed to the mask's own shape.
  void add_scores(const at::Tensor& grad, const ChunkBounds& bounds);
  /// (lead, rows, 1): the sink's weight times the row's gradient.
  void add_sinks(const at::Tensor& grad);

  /// Undefined where no chunk added anything.
  SdpaInputs join() const;

 private:
  const Problem& problem_;
  RowPieces query_, mask_rows_;
  KeySum key_, value_;
  at::Tensor mask_sum_, sinks_;
};

/// The gradients of a call's inputs (or tangents of these).
class WholeGradients {
 public:
  explicit WholeGradients(const Problem& problem);

  void add(const Problem& part, const SdpaInputs& gradients);

  /// In the shapes and dtypes of the inputs; zeros where no part added anything to what is wanted.
  SdpaInputs finish(const SdpaArgs& args, InputMask wanted) const;

 private:
  PartSum query_, key_, value_, attn_mask_, sinks_;
};

}  // namespace attn_ext

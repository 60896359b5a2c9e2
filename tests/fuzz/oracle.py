"""What a case has to give: every output and gradient in float64, by the formulas of the contract, and how far
from that a result may be.

All sums run over what is visible and nothing else, forward and backward, so that NaN and Inf are just where
the contract wants them; ``attn_ext.reference`` is one of those that are held against this.

With u the unit roundoff of what is summed in and ``least`` its smallest normal number (what is below may be
0), w the roundoff of the tensors, and for one row ::

    e = u (D + 8) sum|scale q k| + u (|S| + |bias| + |lse|)          the error of a score
    f = max e over the scores that may be among the largest          the error of lse
    p = |exp(S -+ (e + f) - lse) - P| + u (Lk + 8) P + least         the error of a weight
    T = |dP| + sum P |dP| + |dLse|                                   the size of what dS is summed of

the errors allowed are a small multiple (``SLACK``) of ::

    output  (p + w W) |V|        dV  sums of (p + w W) |dO|
    dS      (p + (w + u (Dv + Lk)) P) T + P sum p |dP|, and dQ, dK, bias, sinks as sums of that

plus each result's own last bit: weights and dS may be rounded to the dtype once, as every fused kernel does,
and sum P dP may be made of the output, which is 0 where the dtype has no number so small.
What exceeds that is held against the contract itself: twice the error of ``attn_ext.reference`` computed in
the case's dtype (``fuzz.py``).

The gradients of query and key are scaled last: where the sum of |dS| |K|, or of |dS| |Q|, leaves the range
that it is summed in, any number will do, however small a scale would bring it back (docs/reliability.md).
"""

import math
from dataclasses import dataclass

import torch
from cases import DTYPES, INPUTS, Case
from torch import Tensor

from attn_ext import reference

SLACK = 4.0


@dataclass
class Expected:
    """One result: what it is, how far off it may be, and where no number is decided."""

    exact: Tensor
    error: Tensor
    loose: bool | Tensor = False  # NaN or Inf: which of them hangs on the order of operations


def _sum_visible(a: Tensor, b: Tensor, visible: Tensor, over: str) -> Tensor:
    """Sums of products of rows of a and b over what is visible.

    over "dim": (n, i, d), (n, j, d) -> (n, i, j); "keys": (n, i, j), (n, j, d) -> (n, i, d);
    "rows": (n, i, j), (n, i, d) -> (n, j, d).
    """
    seen = visible.to(a.dtype)
    if bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()):
        if over == "dim":
            return (a @ b.mT) * seen
        return (a * seen) @ b if over == "keys" else (a * seen).mT @ b
    pair = visible.unsqueeze(-1)
    if over == "dim":
        return torch.where(pair, a.unsqueeze(-2) * b.unsqueeze(-3), 0.0).sum(-1)
    if over == "keys":
        return torch.where(pair, a.unsqueeze(-1) * b.unsqueeze(-3), 0.0).sum(-2)
    return torch.where(pair, a.unsqueeze(-1) * b.unsqueeze(-2), 0.0).sum(-3)


def _finite(t: Tensor) -> Tensor:
    return torch.nan_to_num(t, 0.0, 0.0, 0.0)


def expected(
    case: Case,
    tensors: dict[str, Tensor],
    dropout_seed: Tensor | None,
    *,
    without_zeros: bool = False,
    overflowing: bool = False,
) -> dict[str, Expected]:
    """Every output of a case, and the gradient of each input that it wants ("grad.query").

    ``without_zeros`` takes pairs whose finite scores are too low for a weight out of the backward pass as if
    they were masked: whether NaN times such a weight shows in a gradient is not decided. ``overflowing``
    makes scores NaN that leave the range of the accumulators on the way.
    """
    oracle = _Oracle(case, tensors, dropout_seed, overflowing)
    if without_zeros:
        oracle.visible = oracle.visible & ~((oracle.p < 4 * oracle.least) & oracle.scores.isfinite())
    return oracle.results()


class _Oracle:
    """The formulas, over tensors (n, rows, keys), n counting batch and heads."""

    def __init__(
        self, case: Case, tensors: dict[str, Tensor], dropout_seed: Tensor | None, overflowing: bool
    ) -> None:
        self.case, self.tensors, self.overflowing = case, tensors, overflowing
        dtype = DTYPES[case.dtype]
        self.unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        self.rounding = torch.finfo(dtype).eps / 2
        self.smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        self.tiny = 1e-300 if dtype == torch.float64 else 1e-36
        summed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        self.least, self.most = summed.tiny, summed.max
        self.lead = case.lead or (1,)
        self.count = math.prod(self.lead)
        self.options = dict(case.options)
        self.scale = self.options.get("scale")
        if self.scale is None:
            self.scale = 1.0 / math.sqrt(case.d) if case.d else 1.0
        self.query, self.key, self.value = (self._heads(tensors[n]) for n in ("query", "key", "value"))
        self._forward(dropout_seed)

    # Tensors as (n, rows, columns), and back

    def _heads(self, t: Tensor) -> Tensor:
        if t.dim() == 2:
            t = t.unsqueeze(0)
        if self.case.gqa:
            t = t.repeat_interleave(self.lead[-1] // t.shape[-3] if t.shape[-3] else 1, dim=-3)
        return t.double().expand(*self.lead, *t.shape[-2:]).reshape(self.count, *t.shape[-2:])

    def _scores_like(self, t: Tensor) -> Tensor:
        shape = (*self.lead, self.case.lq, self.case.lk)
        return t.expand(shape).reshape(self.count, *shape[-2:])

    def _back(self, grad: Tensor, name: str) -> Tensor:
        """A gradient summed into its tensor's own shape."""
        shape = self.tensors[name].shape
        grad = grad.reshape(*self.lead, *grad.shape[1:])
        if self.case.gqa and name in ("key", "value"):
            heads = shape[-3]
            grad = grad.unflatten(-3, (heads, self.lead[-1] // heads)).sum(-3)
        return grad.sum_to_size(shape) if grad.shape != shape else grad

    # Forward

    def _visible(self) -> Tensor:
        case, options = self.case, self.options
        visible = reference.visible_keys(
            case.lq,
            case.lk,
            **{n: options[n] for n in ("is_causal", "window_left", "window_right") if n in options},
            query_offset=options.get("query_offset", 0),
        ).expand(self.count, case.lq, case.lk)
        mask = self.tensors.get("attn_mask")
        self.bias = None
        if mask is not None:
            if mask.dtype == torch.bool:
                visible = visible & self._scores_like(mask)
            else:
                bias = self._scores_like(mask.double())
                visible = visible & (bias != -math.inf)
                self.bias = torch.where(visible, bias, 0.0)
        return visible

    def _forward(self, dropout_seed: Tensor | None) -> None:
        case = self.case
        self.visible = visible = self._visible()
        plain = _sum_visible(self.query, self.key, visible, "dim") * self.scale
        plain = torch.where(visible, plain, 0.0)
        size = _finite(self.query).abs() @ _finite(self.key).abs().mT
        if self.overflowing:
            plain = torch.where(visible & (size * max(1.0, 2 * abs(self.scale)) > self.most), math.nan, plain)
        cap = self.options.get("softcap", 0.0)
        self.slope = None
        scores = plain
        if cap > 0:
            bounded = torch.tanh(plain / cap)
            scores = bounded * cap
            self.slope = 1 - bounded.square()
        if self.bias is not None:
            scores = scores + self.bias
        scores = torch.where(visible, scores, -math.inf)
        every = scores
        if case.sinks:
            sinks = self.tensors["sinks"].double().expand(self.lead).reshape(self.count, 1, 1)
            every = torch.cat([scores, sinks.expand(-1, case.lq, 1)], -1)
        top = (
            every.amax(-1, keepdim=True)
            if every.shape[-1]
            else every.new_full((*every.shape[:-1], 1), -math.inf)
        )
        self.empty = top == -math.inf
        exponentials = torch.exp(every - torch.where(self.empty, 0.0, top))
        total = exponentials.sum(-1, keepdim=True)
        weights = exponentials / torch.where(self.empty, 1.0, total)
        self.lse = torch.where(self.empty, -math.inf, torch.where(self.empty, 0.0, top) + total.log())
        # A row of scores that are NaN and others that are +inf (of which amax says NaN).
        rises, broken = (every == math.inf).any(-1), every.isnan().any(-1)
        self.lse = torch.where(rises & ~broken, math.inf, self.lse.squeeze(-1))
        self.lse_is_either = rises & broken
        self.sink_weights = weights[..., case.lk :].squeeze(-1) if case.sinks else None
        # A sink of -inf is none, as a bias of -inf is a mask.
        self.sink_is_seen = (every[..., case.lk :] != -math.inf).squeeze(-1) if case.sinks else None
        self.p = torch.where(visible, weights[..., : case.lk], 0.0)
        self.scores = scores
        self.infinite = bool((every == math.inf).any())
        self.keep = None
        p = self.options.get("dropout_p", 0.0)
        self.w = self.p
        if p > 0:
            assert dropout_seed is not None
            shape = (*self.lead, case.lq, case.lk)
            if case.place:
                drawn = reference.dropout_keep(dropout_seed, p, (case.place + 1, *shape))[case.place]
            else:
                drawn = reference.dropout_keep(dropout_seed, p, shape)
            drawn = drawn.reshape(self.p.shape)
            self.keep = drawn.double() * (1 / (1 - p) if p < 1 else 0.0)
            self.w = self.p * self.keep
        # Errors
        seen = _finite(scores).abs()
        size = size * abs(self.scale) * (case.d + 8) + seen + _finite(self.lse).abs().unsqueeze(-1)
        if self.bias is not None:
            size = size + _finite(self.bias).abs()
        if cap > 0:
            size = size + cap if cap < 1e300 else size
        self._set_errors(every, self.unit * torch.where(visible, size, 0.0))

    def _set_errors(self, every: Tensor, error: Tensor) -> None:
        """Of lse, weights and the sink's share, from the scores'; ``every`` score has its sink behind."""
        case, columns = self.case, self.case.lk
        if case.sinks:
            error = torch.cat([error, self.unit * _finite(every[..., columns:]).abs()], -1)
        finite = every.isfinite()
        low = torch.where(finite, every - error, -math.inf)
        if every.shape[-1]:
            among_largest = finite & (every + error >= low.amax(-1, keepdim=True) - 60)
            of_lse = torch.where(among_largest, error, 0.0).amax(-1, keepdim=True)
        else:
            of_lse = error.sum(-1, keepdim=True)
        lse = _finite(self.lse).unsqueeze(-1)
        exponents = torch.where(finite, every, 0.0) - lse
        least, most = (torch.exp((exponents + s * (error + of_lse)).clamp(max=0.0)) for s in (-1, 1))
        exact = torch.exp(exponents.clamp(max=0.0))
        off = torch.maximum(most - exact, exact - least) + self.unit * (columns + 8) * exact
        off = torch.where(finite, off + self.least, 0.0)
        self.score_error = error[..., :columns].amax(-1) if columns else error.sum(-1)
        self.lse_error = of_lse.squeeze(-1)
        self.weight_error, self.sink_error = off[..., :columns], off[..., columns:].squeeze(-1)
        # Where rounding decides what a weight is, it decides whether 0 or another number meets an Inf.
        self.infinite = self.infinite or bool((self.weight_error > 1e-3).any())

    def _applied_error(self) -> Tensor:
        """Of the weights that are applied, after dropout."""
        error = self.weight_error if self.keep is None else self.weight_error * self.keep
        return error + _finite(self.w) * self.rounding

    # Backward

    def _incoming(self, name: str) -> Tensor | None:
        t = self.tensors.get(f"grad_{name}")
        return None if t is None else t.double().reshape(self.count, *t.shape[len(self.case.lead) :])

    def _backward(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        case, visible, p = self.case, self.visible, self.p
        d_out, d_lse = self._incoming("output"), self._incoming("lse")
        d_weights, d_mass = self._incoming("weights"), self._incoming("key_mass")
        d_w = torch.zeros_like(p)
        size = torch.zeros_like(p)
        grads, sizes = {}, {}
        grads["value"] = torch.zeros_like(self.value)
        sizes["value"] = grads["value"]
        if d_out is not None:
            d_w = d_w + _sum_visible(d_out, self.value, visible, "dim")
            size = size + _finite(d_out).abs() @ _finite(self.value).abs().mT
            grads["value"] = _sum_visible(self.w, d_out, visible, "rows")
            sizes["value"] = self._applied_error().mT @ _finite(d_out).abs()
        for extra in (d_weights, None if d_mass is None else d_mass.unsqueeze(-2)):
            if extra is not None:
                d_w = d_w + extra
                size = size + _finite(extra).abs()
        d_p = d_w if self.keep is None else torch.where(self.keep != 0, d_w * self.keep, d_w * 0)
        size = size if self.keep is None else size * self.keep
        d_p = torch.where(visible, d_p, 0.0)
        row = torch.where(visible, p * d_p, 0.0).sum(-1, keepdim=True)
        d_scores = p * (d_p - row)
        weights = _finite(p)
        row_size = (weights * size).sum(-1, keepdim=True)
        row_error = (self.weight_error * size).sum(-1, keepdim=True)
        if d_out is not None:
            row_error = row_error + self.smallest * _finite(d_out).abs().sum(-1, keepdim=True)
        summed = size + row_size
        if d_lse is not None:
            d_scores = d_scores + p * d_lse.unsqueeze(-1)
            summed = summed + _finite(d_lse).abs().unsqueeze(-1)
        d_scores = torch.where(visible & ~self.empty, d_scores, 0.0)
        relative = self.rounding + self.unit * (case.dv + case.lk + 16)
        terms = (self.weight_error + weights * relative) * summed + (weights + self.weight_error) * row_error
        if case.sinks:
            inner = torch.where(visible.any(-1), -row.squeeze(-1), 0.0)
            sink_size = row_size.squeeze(-1)
            if d_lse is not None:
                inner, sink_size = inner + d_lse, sink_size + _finite(d_lse).abs()
            grads["sinks"] = torch.where(self.sink_is_seen, self.sink_weights * inner, 0.0).sum(-1)
            share = _finite(self.sink_weights)
            relative = self.rounding + self.unit * (case.dv + case.lk + case.lq + 16)
            off = (self.sink_error + share * relative) * sink_size
            off = off + (share + self.sink_error) * row_error.squeeze(-1)
            sizes["sinks"] = off.sum(-1)
        grads["attn_mask"], sizes["attn_mask"] = d_scores, terms
        if self.slope is not None:
            d_scores = d_scores * self.slope
            # tanh(x)^2 loses digits where the slope is small, and x has the error of a score.
            cap_error = self.score_error.unsqueeze(-1) / self.options["softcap"]
            bend = self.rounding * 0 + 8 * self.unit + 2 * cap_error.clamp(max=1.0)
            terms = terms * _finite(self.slope).abs() + _finite(d_scores / self.slope).abs() * bend.clamp(
                max=1.0
            )
            d_scores = torch.where(visible, d_scores, 0.0)
        for name, other, over, left in (
            ("query", self.key, "keys", lambda t: t),
            ("key", self.query, "rows", lambda t: t.mT),
        ):
            grads[name] = self.scale * _sum_visible(d_scores, other, visible, over)
            size = _finite(other).abs()
            unscaled = left(_finite(d_scores).abs() + terms) @ size
            sizes[name] = torch.where(unscaled < self.most, abs(self.scale) * (left(terms) @ size), math.inf)
        return grads, sizes

    # Results

    def results(self) -> dict[str, Expected]:
        """Outputs and gradients in the shapes of the op's."""
        case, found = self.case, {}
        output = _sum_visible(self.w, self.value, self.visible, "keys")
        error = self._applied_error() + _finite(self.w) * (self.unit * case.lk)
        found["output"] = self._expected(output, error @ _finite(self.value).abs())
        vanishing = self.visible & self.scores.isfinite() & (self.p < 4 * self.least)
        meets_inf = vanishing.double() @ self.value.isinf().double() > 0  # as 0 or as the smallest number
        found["output"].loose = meets_inf.reshape(case.output_shapes()["output"]) | self.infinite
        side = dict.fromkeys(case.output_shapes())
        if "weights" in side:
            found["weights"] = self._expected(self.w, self._applied_error())
        if "key_mass" in side:
            error = (self._applied_error() + _finite(self.w) * (self.unit * case.lq)).sum(-2)
            found["key_mass"] = self._expected(self.w.sum(-2), error)
        if "lse" in side:
            error = self.lse_error + self.unit * (case.lk + 8)
            found["lse"] = self._expected(
                self.lse, error, torch.promote_types(DTYPES[case.dtype], torch.float32)
            )
            found["lse"].loose = self.lse_is_either.reshape(case.output_shapes()["lse"])
        shapes = case.output_shapes()
        for name, e in found.items():
            e.exact, e.error = e.exact.reshape(shapes[name]), e.error.reshape(shapes[name])
        if case.incoming:
            found |= self._gradients()
        return found

    def _gradients(self) -> dict[str, Expected]:
        found = {}
        grads, sizes = self._backward()
        for name in self.case.differentiable():
            if name not in self.case.wanted or name not in INPUTS:
                continue
            exact, error = self._back(grads[name], name), self._back(sizes[name], name)
            # What is summed over heads and batches is rounded as it goes.
            parts = max(1, grads[name].numel() // max(1, exact.numel()))
            if parts > 1:
                error = error + self._back(_finite(grads[name]).abs(), name) * (self.unit * parts)
            own = self.tensors[name].dtype
            found[f"grad.{name}"] = self._expected(exact, error, own)
            found[f"grad.{name}"].loose = True
        return found

    def _expected(self, exact: Tensor, error: Tensor, dtype: torch.dtype | None = None) -> Expected:
        info = torch.finfo(dtype or DTYPES[self.case.dtype])
        last_bit = _finite(exact).abs() * info.eps / 2
        return Expected(exact, SLACK * error + last_bit + info.smallest_normal + self.tiny, self.infinite)

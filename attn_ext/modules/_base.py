"""What the attention modules share."""

import math
import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from ..functional import sdpa, sdpa_with_weights

if TYPE_CHECKING:
    from ..distributed import SequenceLayout


class ModuleOptions(TypedDict, total=False):
    """Keyword arguments that every attention module takes; of scores, meant as in :func:`attn_ext.sdpa`."""

    scale: float | None
    window_left: int | None
    window_right: int | None
    softcap: float
    sinks: bool
    context_parallel: "SequenceLayout | None"
    context_parallel_method: str
    device: torch.device | str | int | None
    dtype: torch.dtype | None


class AttentionModule(nn.Module):
    r"""Base of the attention modules: what becomes of the scores, dropout, and weights kept on request.

    Args:
        dropout: probability that a weight is dropped, in training only.
        num_heads: how many sinks there are to learn.
        scale: factor of the scores, :math:`1/\sqrt{D}` if None.
        window_left: a query row sees no key further before it than this; None: no such bound.
        window_right: a query row sees no key further behind it than this; None: no such bound.
        softcap: bound of the scaled scores; 0 for none.
        sinks: learn one score a head that takes part in the softmax and has no value; 0 in the beginning.
        context_parallel: where the rows of the sequence lie, if on several ranks. Each passes and gets its
            own rows; masks have the rows of this rank and the columns of all.
        context_parallel_method: as ``method`` of :func:`attn_ext.distributed.context_parallel_sdpa`.
        device: of the parameters, torch's default if None.
        dtype: of the parameters, torch's default if None.

    Attributes:
        context_parallel: the layout, or None; to be set anew when the length changes.
        keep_weights: set it to True, and every forward keeps its weights in ``last_weights``, to be looked at
            however deep the module sits in a model.
        last_weights: the weights of the last forward with ``keep_weights``, detached, a matrix a head; None
            before.
        sinks: the parameter, :math:`(H,)`, or None.
    """

    keep_weights: bool
    last_weights: Tensor | None
    scale: float | None
    window_left: int | None
    window_right: int | None
    if TYPE_CHECKING:  # TorchScript, which sees no more than is so at run time, leaves out what needs them
        sinks: Tensor | None

    def __init__(self, dropout: float, num_heads: int, **options: Unpack[ModuleOptions]) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie in [0, 1], got {dropout}")
        _check_options(options)
        self.dropout = float(dropout)
        scale = options.get("scale")
        self.scale = None if scale is None else float(scale)
        self.window_left = options.get("window_left")
        self.window_right = options.get("window_right")
        self.softcap = float(options.get("softcap", 0.0))
        sinks = (
            nn.Parameter(torch.zeros(num_heads, **of_parameters(options)))
            if options.get("sinks", False)
            else None
        )
        self.register_parameter("sinks", sinks)
        self.context_parallel = options.get("context_parallel")
        self.context_parallel_method = options.get("context_parallel_method", "auto")
        self.enable_gqa = False
        self.keep_weights = False
        self.last_weights = None

    def reset_parameters(self) -> None:
        """Begin all parameters anew, as the constructor does; after ``to_empty()``, for example."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for child in self.children():
            if isinstance(child, nn.Linear):
                child.reset_parameters()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        query_offset: int,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the op that gives what is needed and no more."""
        dropout_p = self.dropout if self.training else 0.0
        sinks = self.sinks
        if sinks is not None:  # noqa: SIM102 (TorchScript)
            if sinks.size(0) == 1 and query.dim() > 2 and not query.is_nested:  # one head; dim -3 is heads
                sinks = sinks.expand(query.size(-3))
        if self.context_parallel is not None:
            if need_weights or self.keep_weights or query_offset != 0 or query.is_nested:
                raise RuntimeError(
                    "attn_ext: expected no weights, query_offset or nested tensors with context_parallel"
                )
            return self._attend_parallel(query, key, value, attn_mask, is_causal, dropout_p, sinks), None
        if not (need_weights or self.keep_weights):
            output = sdpa(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                self.scale,
                self.enable_gqa,
                self.window_left,
                self.window_right,
                query_offset,
                self.softcap,
                sinks,
            )
            return output, None
        output, weights = sdpa_with_weights(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            self.scale,
            self.enable_gqa,
            self.window_left,
            self.window_right,
            query_offset,
            self.softcap,
            sinks,
        )
        if self.keep_weights:
            self.last_weights = weights.detach()
        return output, weights if need_weights else None

    def _check_padding(self, key_padding_mask: Tensor, keys: int) -> None:
        """Refuse what would broadcast over the keys; with context_parallel they are those of all ranks."""
        columns = 0 if key_padding_mask.dim() == 0 else key_padding_mask.size(-1)
        if columns != keys and self.context_parallel is None:
            raise ValueError(
                f"key_padding_mask must have a column for each of the {keys} keys, got shape "
                f"{list(key_padding_mask.shape)}"
            )

    @torch.jit.unused
    def _attend_parallel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        sinks: Tensor | None,
    ) -> Tensor:
        from ..distributed import context_parallel_sdpa

        assert self.context_parallel is not None
        output = context_parallel_sdpa(
            query,
            key,
            value,
            layout=self.context_parallel,
            method=self.context_parallel_method,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            sinks=sinks,
            dropout_p=dropout_p,
        )
        assert isinstance(output, Tensor)
        return output

    def extra_repr(self) -> str:
        names = ("scale", "window_left", "window_right")
        given = [f"{name}={value}" for name in names if (value := getattr(self, name)) is not None]
        if self.softcap:
            given.append(f"softcap={self.softcap}")
        if self.sinks is not None:
            given.append("sinks=True")
        if self.context_parallel is not None:
            given.append(f"context_parallel={self.context_parallel.world_size} ranks")
        return ", ".join([f"dropout={self.dropout}", *given])


# What nn.MultiheadAttention's other arguments are here.
_OF_TORCH = {
    "kdim": "kdim is key_dim in MultiHeadAttention",
    "vdim": "vdim is value_in_dim in MultiHeadAttention",
    "batch_first": "inputs are (batch, length, features)",
    "add_bias_kv": "it has no counterpart",
    "add_zero_attn": "it has no counterpart",
}


def _check_options(options: ModuleOptions) -> None:
    unknown = options.keys() - ModuleOptions.__annotations__.keys()
    if unknown:
        names = ", ".join(ModuleOptions.__annotations__)
        hints = [f" ({_OF_TORCH[name]})" for name in sorted(unknown) if name in _OF_TORCH]
        raise TypeError(
            f"expected options among {names}, beside the arguments that help() lists, got "
            f"{', '.join(sorted(unknown))}{''.join(hints)}"
        )
    for name in ("scale", "softcap"):
        value = options.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                f"{name} must be a number, got a tensor that requires grad, which it would not get"
            )
    windows = {"window_left": options.get("window_left"), "window_right": options.get("window_right")}
    for name, window in windows.items():
        if window is not None:
            check_int(name, window)
            if window < 0:
                raise ValueError(f"{name} must be at least 0, or None for no bound, got {window}")
    for name, value in (("scale", options.get("scale")), ("softcap", options.get("softcap", 0.0))):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    if options.get("softcap", 0.0) < 0:
        raise ValueError(f"softcap must be at least 0 (0 = none), got {options['softcap']}")


class ParameterOptions(TypedDict):
    device: torch.device | str | int | None
    dtype: torch.dtype | None


def of_parameters(options: ModuleOptions) -> ParameterOptions:
    """Where the parameters of a module are to be, and of which dtype."""
    return {"device": options.get("device"), "dtype": options.get("dtype")}


def check_sizes(**sizes: int | None) -> None:
    """Refuse the first that is below 1, by its name; None stands for a default.

    ``nn.MultiheadAttention`` refuses its own sizes of 0; ``nn.Linear`` would take them and attend to nothing.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        check_int(name, size)
        if size < 1:
            raise ValueError(f"{name} must be greater than 0, got {size}")


def check_int(name: str, value: int) -> None:
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def default_to(value: int | None, default: int) -> int:
    """``value``, or ``default`` if it is None; 0 is a value."""
    return default if value is None else value

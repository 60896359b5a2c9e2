"""``attn_ext.record``: watches the attention of a model and keeps what was asked for."""

import difflib
import fnmatch
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import _call
from ._call import Call, Index
from ._recording import KINDS, CallShape, Recording
from ._scripted import ScriptedNames
from ._store import FileStore, MemoryStore
from ._transformers import reached_by_transformers
from ._watch import Watcher, watching

__all__ = ["record"]

#: What a record may hold in memory unless ``max_bytes`` says otherwise.
MAX_BYTES = 2 << 30

_ONE_HEAD = ("SelfAttention", "CrossAttention")

Layers = str | int | Sequence[str | int] | None


class record:
    """Keep what the attention of a model looks at, while the model runs as it always does.

    Works for the modules of this package, for every model that calls
    ``torch.nn.functional.scaled_dot_product_attention`` (timm, diffusers, torchvision, transformers' "sdpa"),
    for ``torch.nn.MultiheadAttention``, after :func:`attn_ext.override_sdpa` and :func:`attn_ext.convert`,
    and for TorchScript. The model's outputs stay what they are: what is recorded is computed beside the call,
    without gradients, from the same query, key and mask.

    The block is given a :class:`~attn_ext.recording.Recording`: ``seen[path]`` is a list, one tensor a call,
    on the CPU. Each generated token is a call.

    Args:
        model: the model that runs inside the ``with`` block; other models there are not recorded.
        what: one or several of ``"weights"`` (Lq by Lk a head), ``"key_mass"`` (the sum of the weights that
            each key receives), ``"lse"`` (log-sum-exp of each row of scores), ``"entropy"`` (of each row of
            weights, in nats; what a sink takes is left out) and ``"top"`` (the largest weights of each row).
            All are those **before dropout**. Only ``"weights"`` takes memory of Lq by Lk.
        layers: which attentions: paths as in ``named_modules``, a part of the model that holds them, glob
            patterns (``"encoder.*"``), or numbers from 0 in the order in which they are first called.
        heads: numbers or a slice; all if None.
        rows: numbers or a slice of the query rows of each call; all if None. ``rows=-1`` is the newest token.
        top: how many weights a row ``"top"`` keeps.
        max_bytes: the most that may be kept; by default 2 GiB in memory, and no limit in a file.
        to: a file to write to instead of keeping tensors in memory, ``.npz`` of NumPy, which
            :func:`attn_ext.recording.load` reads. It appears when the block ends without an error.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: an unknown ``what``; a layer that is not there; a file that is no ``.npz``; on exit, no
            attention was recorded.
        MemoryError: more than ``max_bytes`` would be kept.
        IndexError: a head or a row that is not there.
        OSError: ``to`` cannot be written.

    Warns:
        UserWarning: some attention of the model ran by code of its own, which nothing can look into;
            ``seen.not_recorded`` names it.

    Source:
        Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", figure
        3, for pictures of weights; key mass as in :func:`attn_ext.sdpa_with_key_mass`.

    Example:
        >>> import torch, attn_ext
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> with attn_ext.record(model, what=("weights", "entropy")) as seen:
        ...     _ = model(torch.randn(2, 5, 16))
        >>> seen.layers
        ('self_attn',)
        >>> seen["self_attn"][0].shape, seen["self_attn", "entropy"][0].shape
        (torch.Size([2, 4, 5, 5]), torch.Size([2, 4, 5]))
    """

    def __init__(
        self,
        model: nn.Module,
        what: str | Sequence[str] = "weights",
        *,
        layers: Layers = None,
        heads: Index = None,
        rows: Index = None,
        top: int = 10,
        max_bytes: int | None = None,
        to: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"expected a torch.nn.Module, got {type(model).__name__}: of a pipeline pass the part that "
                "attends, as in pipeline.model or pipeline.unet"
            )
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        self._model = model
        self._what = _checked_kinds(what)
        self._paths = _module_paths(model)
        self._scripted = ScriptedNames(model, self._paths)
        self._layers = _checked_layers(layers, [*self._paths.values(), *self._scripted.classes])
        self._heads, self._rows, self._top = heads, rows, top
        self._to = None if to is None else Path(to)
        if self._to is not None and self._to.suffix != ".npz" and not self._to.is_dir():
            raise ValueError(f"cannot write {to} as a record: expected the extension .npz")
        self._max_bytes = MAX_BYTES if max_bytes is None and to is None else max_bytes

    def __enter__(self) -> Recording:
        self._store = MemoryStore() if self._to is None else FileStore.create(self._to)
        self.seen = Recording(self._store, self._what)
        self._thread = threading.get_ident()
        self._running: list[str] = []
        self._ran: list[str] = []
        self._order: list[str] = []
        self._bytes = 0
        self._classes = {path: _class_name(module) for module, path in self._paths.items()}
        self._classes |= self._scripted.classes
        self._refused: BaseException | None = None
        self._exit = ExitStack()
        try:
            self._own = self._exit.enter_context(reached_by_transformers(self._model))
            self._hook()
            self._exit.enter_context(watching(Watcher(self._on_call, self._on_refusal)))
        except BaseException:
            self._store.abandon()
            self._exit.close()
            raise
        return self.seen

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._exit.close()
        if error is None and self._refused is None:
            try:
                self._check_recorded()
            except ValueError:
                self._store.abandon()
                raise
            self._store.close(self.seen.index())
        else:
            self._store.abandon()
        self.seen.closed = True
        if self._refused is not None and error is not self._refused:
            # TorchScript hands an error on without its message, and a model may have caught it.
            raise self._refused from None

    # Which module runs

    def _hook(self) -> None:
        for module, path in self._paths.items():
            before = nn.Module.register_forward_pre_hook(module, self._before(path))
            self._exit.callback(before.remove)
            after = nn.Module.register_forward_hook(module, self._after(path), always_call=True)
            self._exit.callback(after.remove)

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == self._thread:
                self._running.append(path)
                self._scripted.begin(path)
                if path not in self._ran and "attention" in _class_name(module).lower():
                    self._ran.append(path)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                while self._running and self._running.pop() != path:
                    pass  # a module that an exception left

        return hook

    # What a call shows

    def _on_call(self, call: Call) -> None:
        try:
            self._record_call(call)
        except BaseException as error:
            self._refused = error
            raise

    def _record_call(self, call: Call) -> None:
        if not self._running and not self._scripted.is_model:
            return  # not of this model
        path = self._scripted.next_call(self._running[-1] if self._running else "")
        if self._classes.get(path) in _ONE_HEAD:
            call = call.with_head_dim()
        if path not in self._order:
            self._order.append(path)
        if not self._wanted(path):
            return
        rows = None if self._rows is None else _call.chosen(self._rows, call.num_rows, "rows")
        heads = None if self._heads is None else _call.chosen(self._heads, call.num_heads, "heads")
        calls = call.of_heads(heads).of_rows(rows)
        self._check_bytes(path, calls)
        for what in self._what:
            for kind, tensor in self._side_outputs(what, calls):
                self._store.append(kind, path, _kept(tensor))
        self.seen.calls.setdefault(path, []).append(CallShape(call.num_rows, call.num_keys, rows, heads))

    def _side_outputs(self, what: str, calls: list[Call]) -> list[tuple[str, Tensor]]:
        if what == "top":
            values, keys = _call.top(calls, self._top)
            return [("top", values), ("top_keys", keys)]
        return [(what, getattr(_call, what)(calls))]

    def _check_bytes(self, path: str, calls: list[Call]) -> None:
        """Before anything is computed."""
        size = sum(_bytes_of(what, calls, self._top) for what in self._what)
        if self._max_bytes is not None and self._bytes + size > self._max_bytes:
            raise MemoryError(
                f"recording {path or 'the model'} would bring the record to {self._bytes + size:,} bytes, "
                f"and max_bytes is {self._max_bytes:,}: ask for less by layers=, heads=, rows= or what=, "
                "write to a file by to=, or raise max_bytes"
            )
        self._bytes += size

    def _on_refusal(self, reason: str) -> None:
        if self._running:
            self.seen.not_recorded[self._running[-1]] = reason

    def _wanted(self, path: str) -> bool:
        if self._layers is None:
            return True
        number = self._order.index(path)
        return any(
            number == layer if isinstance(layer, int) else _matches(path, layer) for layer in self._layers
        )

    # What was not seen

    def _check_recorded(self) -> None:
        """Name the attention that nothing could look into, and the layers that attended to nothing."""
        reached = [*self._order, *self.seen.not_recorded]
        for path in self._ran:
            if not any(_within(path, other) or _within(other, path) for other in reached):
                reason = self._own.get(path, "it computes attention by code of its own")
                self.seen.not_recorded[path] = reason
        missed = "; ".join(f"{path or 'the model'}: {why}" for path, why in self.seen.not_recorded.items())
        if not self._order:
            ran = "no attention ran in the with block" if not missed else f"no attention was seen: {missed}"
            raise ValueError(
                f"{ran}; recorded are attn_ext, F.scaled_dot_product_attention and what calls them"
            )
        for layer in self._layers or []:
            numbers = range(len(self._order))
            if not (
                layer in numbers if isinstance(layer, int) else any(_matches(p, layer) for p in self._order)
            ):
                ran = _listed([path or repr(path) for path in self._order])
                raise ValueError(f"no attention ran in layers={layer!r}: it ran in {ran}")
        if missed:
            warnings.warn(f"not recorded: {missed}", stacklevel=3)


def _kept(tensor: Tensor) -> Tensor:
    """On the CPU; it was computed for the record alone."""
    return tensor.detach().cpu().contiguous()


def _bytes_of(what: str, calls: list[Call], top: int) -> int:
    total = 0
    for call in calls:
        lead = 1
        for size in call.lead_shape:
            lead *= size
        element = call.query.element_size()
        total += (
            lead
            * {
                "weights": call.num_rows * call.num_keys * element,
                "key_mass": call.num_keys * element,
                "lse": call.num_rows * max(4, element),
                "entropy": call.num_rows * max(4, element),
                "top": call.num_rows * min(top, call.num_keys) * (element + 8),
            }[what]
        )
    return total


def _checked_kinds(what: str | Sequence[str]) -> tuple[str, ...]:
    kinds = (what,) if isinstance(what, str) else tuple(dict.fromkeys(what))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"what={kind!r} is not one of {', '.join(KINDS)}{_close(kind, list(KINDS))}")
    if not kinds:
        raise ValueError(f"what is empty: expected one or several of {', '.join(KINDS)}")
    return kinds


def _module_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Each module with its path, as without the wrapper of torch.compile."""
    paths: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        parts = [part for part in path.split(".") if part != "_orig_mod"]
        paths[module] = ".".join(parts)
    return paths


def _checked_layers(layers: Layers, paths: list[str]) -> list[str | int] | None:
    if layers is None:
        return None
    result = [layers] if isinstance(layers, (str, int)) else list(layers)
    if not result:
        raise ValueError("layers is empty: expected paths, patterns or numbers, or None for all")
    for layer in result:
        if isinstance(layer, int) and layer < 0:
            raise ValueError(
                f"layers={layer}: which one is the last is not known before it ran; name it by its path"
            )
        if isinstance(layer, str) and not any(_matches(path, layer) for path in paths):
            raise ValueError(f"layers={layer!r}: the model has no such module{_close(layer, paths)}")
    return result


def _matches(path: str, pattern: str) -> bool:
    """Whether the pattern is the path, or names something that holds it."""
    return (
        _within(path, pattern)
        or fnmatch.fnmatchcase(path, pattern)
        or fnmatch.fnmatchcase(path, f"{pattern}.*")
    )


def _within(path: str, whole: str) -> bool:
    return whole == "" or path == whole or path.startswith(f"{whole}.")


def _close(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; close to it: {_listed(near)}" if near else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _class_name(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))

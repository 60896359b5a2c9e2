"""The calls that ``digest.py`` makes: a list of named cases, each of which builds its own tensors.

Nothing here comes from the package under test, so that two builds are given the very same calls. The
numbers hang on a case's name alone.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Options = dict[str, Any]

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
OUTPUTS = "olwk"  # output, lse, weights, key mass: whose gradients come in
INPUTS = "qkvms"  # query, key, value, mask, sinks: whose gradients are wanted


def stable_number(text: str) -> int:
    """A number that hangs on the text alone, below 2^62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


# Masks -------------------------------------------------------------------------------------------


def _random_bool(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) < 0.6


def _columns(shape: Shape) -> Tensor:
    return torch.arange(shape[-1]) if shape else torch.tensor(0)


def _lengths(shape: Shape, generator: torch.Generator) -> Tensor:
    """How many keys a row sees: at least one, and never the last of many."""
    most = max(shape[-1] * 3 // 4, 1)
    return torch.randint(1, most + 1, (*shape[:-1], 1), generator=generator)


def _padding(shape: Shape, generator: torch.Generator) -> Tensor:
    return _columns(shape) < _lengths(shape, generator)


def _left_padding(shape: Shape, generator: torch.Generator) -> Tensor:
    return _columns(shape) >= _lengths(shape, generator)


def _holes(shape: Shape, generator: torch.Generator) -> Tensor:
    """Padding with gaps: no range of keys says it all."""
    return _padding(shape, generator) & (_columns(shape) % 5 != 3)


def _blocks(shape: Shape, generator: torch.Generator) -> Tensor:
    """Every other run of 64 keys is hidden as a whole, and some keys in the rest."""
    return _random_bool(shape, generator) & (_columns(shape) // 64 % 2 == 0)


def _dead_rows(shape: Shape, generator: torch.Generator) -> Tensor:
    """Every third row from the second on sees nothing, the first everything."""
    mask = _random_bool(shape, generator)
    if mask.dim() > 1:
        mask[..., :1, :] = True
        mask[..., 1::3, :] = False
    return mask


def _all_false(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _all_true(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _bias(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _bias_minus_inf(shape: Shape, generator: torch.Generator) -> Tensor:
    return _bias(shape, generator).masked_fill(~_dead_rows(shape, generator), -math.inf)


def _bias_padding(shape: Shape, generator: torch.Generator) -> Tensor:
    return _bias(shape, generator).masked_fill(~_padding(shape, generator), -math.inf)


def _with_one(value: float) -> Callable[[Shape, torch.Generator], Tensor]:
    def make(shape: Shape, generator: torch.Generator) -> Tensor:
        bias = _bias(shape, generator)
        if bias.numel():
            bias.view(-1)[bias.numel() // 2] = value
        return bias

    return make


def _far(value: float, *, plain: bool) -> Callable[[Shape, torch.Generator], Tensor]:
    """Rows that a finite number hides as a whole, and others of which it hides some keys."""

    def make(shape: Shape, generator: torch.Generator) -> Tensor:
        hidden = ~_dead_rows(shape, generator)
        bias = torch.zeros(shape, dtype=torch.float64) if plain else _bias(shape, generator)
        return bias + hidden * value

    return make


MASKS: dict[str, Callable[[Shape, torch.Generator], Tensor]] = {
    "bool": _random_bool,
    "padding": _padding,
    "left_padding": _left_padding,
    "holes": _holes,
    "blocks": _blocks,
    "dead_rows": _dead_rows,
    "all_false": _all_false,
    "all_true": _all_true,
    "bias": _bias,
    "bias_minus_inf": _bias_minus_inf,
    "bias_padding": _bias_padding,
    "bias_large": lambda shape, generator: 300 * _bias(shape, generator),
    "bias_nan": _with_one(math.nan),
    "bias_inf": _with_one(math.inf),
    "far": _far(-1e9, plain=False),
    "far_plain": _far(-6e4, plain=True),
    "far_lowest": _far(-math.inf, plain=True),  # the lowest finite number of its dtype: see below
    "far_positive": _far(6e4, plain=False),
}


def _to_dtype(mask: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The mask as an argument; what its dtype has no number for becomes its lowest, if it is to be far."""
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(dtype).min
    return mask.clamp(min=lowest).to(dtype) if kind.startswith("far") else mask.to(dtype)


# Layouts -----------------------------------------------------------------------------------------


def _heads_last(t: Tensor) -> Tensor:
    return t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-2, -1).contiguous().transpose(-2, -1) if t.dim() > 1 else t


def _every_second(t: Tensor) -> Tensor:
    return torch.stack([t, t + 1 if t.is_floating_point() else ~t], dim=-1).flatten(-2)[..., ::2]


def _padded_rows(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (1, 2))[..., 1:-2]


def _unaligned(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t.reshape(-1), (1, 0))[1:].view(t.shape)


def _expanded_batch(t: Tensor) -> Tensor:
    return t[:1].expand_as(t) if t.dim() > 2 else t


def _expanded(t: Tensor) -> Tensor:
    """One number for all, of stride 0, as the gradient of a sum comes in."""
    return t.reshape(-1)[:1].view((1,) * t.dim()).expand_as(t) if t.numel() else t


def _expanded_rows(t: Tensor) -> Tensor:
    return t[..., :1, :].expand_as(t) if t.dim() > 1 else t


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "heads_last": _heads_last,
    "transposed": _transposed,
    "every_second": _every_second,
    "padded_rows": _padded_rows,
    "unaligned": _unaligned,
    "expanded_batch": _expanded_batch,
    "expanded": _expanded,
    "expanded_rows": _expanded_rows,
}


# Cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The tensors of a case; ``incoming`` are the gradients of output, lse, weights and key mass."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    incoming: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: shapes, mask, layouts, options, and which gradients come in and go out."""

    name: str
    lengths: tuple[int, int] = (5, 7)  # Lq, Lk
    dims: tuple[int, int] = (8, 8)  # D, Dv
    batch: Shape = (1,)
    heads: int = 2  # 0: no dim for them
    key_heads: int = 0  # fewer than heads: grouped; 0: as many
    ones: tuple[str, ...] = ()  # dims of size 1 that broadcast: "key.batch", "query.heads"
    mask: str = ""
    mask_dims: str = "bhqk"  # each letter a dim, "a" the first batch dim alone, "1" one that broadcasts
    mask_float32: bool = False
    mask_layout: str = "contiguous"
    sinks: str = ""  # "heads", "batch", "float32", "minus_inf" or "large"
    layout: str = "contiguous"
    grad_layout: str = "contiguous"
    change: tuple[str, ...] = ()  # "key:last:nan": numbers put where they may do harm
    seeds: str = ""  # "batch": a seed of dropout for each
    options: Options = field(default_factory=dict)
    grads: tuple[tuple[str, str], ...] = ()  # incoming and wanted; () for two that the name chooses
    dtypes: tuple[str, ...] = tuple(DTYPES)

    @property
    def work(self) -> int:
        """Multiply-adds of both products; for few of them no threads are started."""
        return math.prod(self.batch) * max(self.heads, 1) * math.prod(self.lengths) * sum(self.dims)

    @property
    def tries_threads(self) -> bool:
        """Whether it is run on every number of threads, not two: what is about them, and some of the rest."""
        kind = self.name.partition("/")[0]
        return kind in ("threads", "copies", "large") or stable_number(self.name) % 6 == 0

    @property
    def grouped(self) -> bool:
        """Whether query heads share key heads."""
        return 0 < self.key_heads < self.heads

    @property
    def passes(self) -> tuple[tuple[str, str], ...]:
        """The backward passes to make: what comes in, and what is wanted of it."""
        if self.grads:
            return self.grads
        number = stable_number(self.name + " grads")
        incoming = ("olwk", "l", "w", "k", "ol", "ow", "ok", "wk", "owk", "olk")
        wanted = ("qkvms", "qkvms", "qkvms", "q", "k", "v", "m", "s", "qk", "kv", "qv", "vm", "ms", "qkms")
        second = incoming[number % len(incoming)], wanted[number // 64 % len(wanted)]
        return ("o", "qkvms"), second

    def _shape(self, name: str, length: int, dim: int) -> Shape:
        heads = self.key_heads or self.heads if name in ("key", "value") else self.heads
        batch = tuple(1 for _ in self.batch) if f"{name}.batch" in self.ones else self.batch
        if f"{name}.no_batch" in self.ones:
            batch = ()
        if not self.heads:
            return length, dim
        return *batch, 1 if f"{name}.heads" in self.ones else heads, length, dim

    def _mask_shape(self) -> Shape:
        sizes: dict[str, Shape] = {
            "b": self.batch,
            "a": (*self.batch[:1], *(1 for _ in self.batch[1:])),
            "h": (self.heads,) if self.heads else (),
            "q": self.lengths[:1],
            "k": self.lengths[1:],
            "1": (1,),
        }
        return tuple(size for letter in self.mask_dims for size in sizes[letter])

    def _changed(self, name: str, t: Tensor) -> Tensor:
        for change in self.change:
            target, place, what = change.split(":")
            if target != name or t.numel() == 0:
                continue
            if place == "all":
                t += float(what)
                continue
            row = {"first": 0, "middle": t.shape[-2] // 2, "last": t.shape[-2] - 1}[place]
            heads = t.reshape(-1, *t.shape[-2:])
            heads[0, row, t.shape[-1] // 2] = float(what)
            heads[-1, row, :] = float(what)
            t = heads.view(t.shape)
        return t

    def build(self, dtype_name: str) -> Call:
        """The tensors of this case; the same numbers, rounded, for every dtype."""
        dtype = DTYPES[dtype_name]
        generator = torch.Generator().manual_seed(stable_number(self.name))
        query_len, key_len = self.lengths
        dim, value_dim = self.dims

        def numbers(name: str, shape: Shape, layout: str, out: torch.dtype = dtype) -> Tensor:
            t = torch.randn(shape, generator=generator, dtype=torch.float64)
            return LAYOUTS[layout](self._changed(name, t).to(out))

        query = numbers("query", self._shape("query", query_len, dim), self.layout)
        key = numbers("key", self._shape("key", key_len, dim), self.layout)
        value = numbers("value", self._shape("value", key_len, value_dim), self.layout)
        mask = sinks = seed = None
        if self.mask:
            numbers_of_mask = MASKS[self.mask](self._mask_shape(), generator)
            mask = _to_dtype(numbers_of_mask, self.mask, torch.float32 if self.mask_float32 else dtype)
            mask = LAYOUTS[self.mask_layout](mask)
        if self.sinks:
            shape = (*self.batch, self.heads) if self.sinks == "batch" else (max(self.heads, 1),)
            numbers_of_sinks = torch.randn(shape, generator=generator)
            if self.sinks == "minus_inf":
                numbers_of_sinks[..., 0] = -math.inf
            if self.sinks == "large":
                numbers_of_sinks *= 100
            sinks = numbers_of_sinks.to(torch.float32 if self.sinks == "float32" else dtype)
        if self.options.get("dropout_p", 0) > 0:
            seed = torch.tensor(stable_number(self.name + " seed"))
            if self.seeds == "batch":
                seed = seed + torch.arange(self.batch[0])
        lead: Shape = (*self.batch, self.heads) if self.heads else ()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        shapes = {
            "o": ("grad", (*lead, query_len, value_dim), dtype),
            "l": ("grad_lse", (*lead, query_len), wide),
            "w": ("grad_weights", (*lead, query_len, key_len), dtype),
            "k": ("grad_key_mass", (*lead, key_len), dtype),
        }
        used = {letter for letters, _ in self.passes for letter in letters}
        incoming = {
            letter: numbers(name, shape, self.grad_layout, out)
            for letter, (name, shape, out) in shapes.items()
            if letter in used
        }
        return Call(query, key, value, mask, sinks, seed, incoming)


# Lists -------------------------------------------------------------------------------------------

#: One call for each way through forward and backward, and what these are.
WAYS: dict[str, Options] = {
    "one_row": {"lengths": (1, 300), "batch": (2,)},  # few rows both ways
    "few_rows": {"lengths": (4, 531), "dims": (16, 16), "batch": (2,)},  # few rows both ways
    "few_rows_tiles": {"lengths": (11, 301), "dims": (16, 12), "batch": (2,)},  # few rows, then tiles
    "few_rows_few_keys": {"lengths": (5, 37), "dims": (16, 16), "batch": (2,)},  # few rows, then few keys
    "few_keys": {"lengths": (40, 70), "dims": (16, 20), "batch": (2,)},  # whole rows, few keys
    "all_keys": {"lengths": (62, 128), "dims": (20, 16), "batch": (2,)},  # whole rows, few keys at most
    "tiles": {"lengths": (70, 230), "dims": (16, 24), "batch": (2,)},  # whole rows, tiles
    "split": {"lengths": (19, 1100), "dims": (8, 16)},  # split, tiles
    "online": {"lengths": (40, 1090), "dims": (16, 8)},  # online, tiles
    "phases": {"lengths": (513, 520), "dims": (8, 8)},  # whole rows, tiles in two segments
}
#: The cheaper ones of them.
SHORT_WAYS = tuple(name for name in WAYS if name != "phases")

ROTATED_MASKS: tuple[Options, ...] = (
    {"mask": "padding", "mask_dims": "b11k"},
    {"mask": "bias", "mask_dims": "hqk"},
    {"options": {"is_causal": True, "query_offset": 3}},
    {"mask": "bool", "mask_dims": "bhqk"},
    {"mask": "holes", "mask_dims": "1k", "sinks": "heads"},
    {"mask": "bias_minus_inf", "mask_dims": "qk", "mask_float32": True},
    {"options": {"softcap": 2.0, "window_left": 20}},
    {"mask": "bias", "mask_dims": "b11k", "options": {"dropout_p": 0.2}},
    {"mask": "dead_rows", "mask_dims": "b1qk", "sinks": "float32"},
    {"mask": "far", "mask_dims": "bhqk", "mask_float32": True},
    {"mask": "bias_padding", "mask_dims": "h1k", "options": {"is_causal": True, "query_offset": 40}},
)


def _merged(*parts: Options) -> Options:
    """Fields of a case, with options put together."""
    fields: Options = {}
    for part in parts:
        for name, value in part.items():
            fields[name] = {**fields.get(name, {}), **value} if name == "options" else value
    return fields


def _case(name: str, *parts: Options) -> Case:
    return Case(name, **_merged(*parts))


def _some(name: str, count: int, among: Sequence[str] = tuple(DTYPES)) -> Options:
    """A few dtypes, other ones for other names: for lists whose cases differ little."""
    first = stable_number(name + " dtypes")
    return {"dtypes": tuple(d for d in among if d in {among[(first + i) % len(among)] for i in range(count)})}


KEY_LENGTHS = (
    *(0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 95, 96, 97, 112, 127),
    *(
        128,
        129,
        143,
        144,
        145,
        192,
        193,
        215,
        216,
        217,
        240,
        255,
        256,
        257,
        272,
        383,
        385,
        432,
        433,
        511,
        512,
    ),
    *(513, 529, 640, 768, 769, 1023, 1024, 1025, 1040, 1536, 1537),
)
QUERY_LENGTHS = (
    *(
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        12,
        13,
        15,
        16,
        17,
        18,
        23,
        24,
        25,
        31,
        32,
        33,
        47,
        48,
        49,
        60,
        61,
        66,
    ),
    *(90, 91, 95, 96, 97, 98, 127, 128, 129, 191, 192, 193, 215, 217, 255, 256, 257, 258, 288, 289, 385),
)
DIMS = (
    *(0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 95, 96, 97, 127, 128),
    *(129, 160, 192, 256, 257),
)


def _key_lengths() -> Iterator[Case]:
    """Both sides of every threshold of Lk, at both sides of those of Lq."""
    for i, key_len in enumerate(KEY_LENGTHS):
        for j, query_len in enumerate((1, 8, 9, 16, 17, 33)):
            name = f"keys/{query_len}x{key_len}"
            base = {"lengths": (query_len, key_len), "dims": ((8, 8), (16, 12), (13, 16))[(i + j) % 3]}
            yield _case(name, base, _some(name, 2))
            name += "/" + str((i * 6 + j) % len(ROTATED_MASKS))
            yield _case(name, base, ROTATED_MASKS[(i * 6 + j) % len(ROTATED_MASKS)], _some(name, 1))


def _query_lengths() -> Iterator[Case]:
    """Both sides of every threshold of Lq: tiles of rows, blocks, groups of tiles."""
    for i, query_len in enumerate(QUERY_LENGTHS):
        for j, key_len in enumerate((5, 40, 128, 130, 300)):
            name = f"rows/{query_len}x{key_len}"
            base = {"lengths": (query_len, key_len), "heads": 1 + (i + j) % 3}
            yield _case(name, base, _some(name, 1))
            name += "/" + str((i * 5 + j) % len(ROTATED_MASKS))
            yield _case(name, base, ROTATED_MASKS[(i * 5 + j) % len(ROTATED_MASKS)], _some(name, 1))
    for i, query_len in enumerate((17, 23, 24, 25, 31, 32, 33, 95, 96, 97, 193, 257)):
        base = {"lengths": (query_len, 1030 + i), "heads": 1}
        yield _case(f"rows/{query_len}x{1030 + i}", base)
        yield _case(f"rows/{query_len}x{1030 + i}/m", base, ROTATED_MASKS[i % len(ROTATED_MASKS)])


def _dims() -> Iterator[Case]:
    """Widths of panels and what is left of them."""
    for i, dim in enumerate(DIMS):
        # Without a dim there is no 1 / sqrt(D).
        scale = {"options": {"scale": 0.5}} if dim == 0 else {}
        for j, lengths in enumerate(
            ((1, 290), (7, 150), (12, 40), (33, 97), (14, 140), (18, 1030), (34, 1027))
        ):
            name = f"dims/{dim}/{lengths[0]}x{lengths[1]}"
            base = _merged({"lengths": lengths, "heads": 2 if lengths[1] < 1000 else 1}, scale)
            yield _case(name, base, {"dims": (dim, dim)}, _some(name, 2))
            other = DIMS[(i * 7 + j * 3 + 5) % len(DIMS)]
            name = f"dims/{dim}-{other}/{lengths[0]}x{lengths[1]}"
            mask = ROTATED_MASKS[(i + j) % len(ROTATED_MASKS)] if (i + j) % 2 else {}
            yield _case(name, base, mask, {"dims": (dim, other)}, _some(name, 1))


def _masks() -> Iterator[Case]:
    """Kinds of masks in every shape that broadcasts, and their gradients."""
    kinds_of_bool = (
        "bool",
        "padding",
        "left_padding",
        "holes",
        "blocks",
        "dead_rows",
        "all_false",
        "all_true",
    )
    dims_of_bool = ("bhqk", "qk", "q1", "k", "1k", "b11k", "h1k", "b1q1", "b1qk", "hq1", "1", "")
    for i, kind in enumerate(kinds_of_bool):
        for j, dims in enumerate(dims_of_bool):
            if kind in ("padding", "left_padding", "holes", "blocks") and dims in ("1", ""):
                continue
            for k, way in enumerate(SHORT_WAYS):
                # A third of all: every kind in every shape, a kind or a shape on every way.
                if (i + j + k) % 3 == 0:
                    name = f"mask/{kind}/{dims or '0'}/{way}"
                    layout = {
                        "mask_layout": ("contiguous", "transposed", "every_second", "heads_last")[i % 4]
                    }
                    strided = layout if j % 4 == 1 else {}
                    yield _case(name, WAYS[way], {"mask": kind, "mask_dims": dims}, strided, _some(name, 1))
    dims_of_bias = [a + b + c + d for a in "b1" for b in "h1" for c in "q1" for d in "k1"]
    dims_of_bias += ["qk", "hqk", "h1k", "k", "q1", "1", "", "1k", "hq1"]
    for j, dims in enumerate(dims_of_bias):
        for k, way in enumerate(WAYS):
            if way == "phases" and j % 3:
                continue
            name = f"bias/{dims or '0'}/{way}"
            fields: Options = {"mask": "bias", "mask_dims": dims, "mask_float32": (j + k) % 2 == 1}
            passes: Options = {"grads": (("o", "qkvm"), ("olwk" if (j + k) % 4 == 2 else "o", "m"))}
            sizes = {"heads": 2 + (j + k) % 2}
            yield _case(name, WAYS[way], sizes, fields, passes, _some(name, 1))
    kinds = ("bias_minus_inf", "bias_padding", "bias_large", "bias_nan", "bias_inf", "far_positive")
    for i, kind in enumerate(kinds):
        for k, way in enumerate(SHORT_WAYS):
            dims = ("bhqk", "qk", "b11k", "h1k", "hqk")[(i + k) % 5]
            lies = ("contiguous", "transposed", "every_second", "padded_rows", "unaligned")[(i + k) % 5]
            name = f"bias/{kind}/{dims}/{way}"
            fields = {
                "mask": kind,
                "mask_dims": dims,
                "mask_layout": lies,
                "mask_float32": k % 2 == 0,
            }
            yield _case(name, WAYS[way], fields, _some(name, 2))
    for way in WAYS:
        for lies in (
            "expanded_batch",
            "expanded",
            "expanded_rows",
            "transposed",
            "every_second",
            "unaligned",
        ):
            name = f"bias/layout/{lies}/{way}"
            yield _case(name, WAYS[way], {"mask": "bias", "mask_layout": lies}, _some(name, 1))


def _far_rows() -> Iterator[Case]:
    """Rows whose every key a large finite bias hides: their weights are made anew."""
    for i, kind in enumerate(("far", "far_plain", "far_lowest")):
        for k, way in enumerate(WAYS):
            for dims in ("bhqk", "b11k" if k % 2 else "b1q1"):
                for sinks in ("", "heads" if (i + k) % 2 else "large"):
                    name = f"far/{kind}/{dims}/{way}/{sinks or 'no_sinks'}"
                    fields = {
                        "mask": kind,
                        "mask_dims": dims,
                        "sinks": sinks,
                        "mask_float32": (i + k) % 2 == 0,
                    }
                    extra = {"options": {"dropout_p": 0.1}} if (i + k) % 5 == 4 else {}
                    yield _case(name, WAYS[way], fields, extra, _some(name, 2))


OPTIONS: dict[str, Options] = {
    "causal": {"is_causal": True},
    "causal_offset": {"is_causal": True, "query_offset": 13},
    "causal_last": {"is_causal": True, "query_offset": 250},
    "causal_negative": {"is_causal": True, "query_offset": -3},
    "causal_dead": {"is_causal": True, "query_offset": -5000},
    "left": {"window_left": 9},
    "left_negative": {"window_left": 70, "query_offset": -60},
    "left_far": {"window_left": 3, "query_offset": 1000},
    "right": {"window_right": 5},
    "right_negative": {"window_right": 66, "query_offset": -2},
    "window": {"window_left": 33, "window_right": 18, "query_offset": 20},
    "window_negative": {"window_left": 20, "window_right": 17, "query_offset": -9},
    "window_of_one": {"window_left": 0, "window_right": 0, "query_offset": 6},
    "window_wide": {"window_left": 2**40, "window_right": 2**40},
    "causal_window": {"is_causal": True, "window_left": 64, "query_offset": 128},
    "softcap": {"softcap": 0.9},
    "softcap_large": {"softcap": 50.0, "scale": 30.0},
    "softcap_causal": {"softcap": 3.0, "is_causal": True, "query_offset": 30},
    "scale_zero": {"scale": 0.0},
    "scale_negative": {"scale": -0.7},
    "scale_tiny": {"scale": 1e-30},
    "scale_subnormal": {"scale": 1e-42},
    "scale_large": {"scale": 40.0},
    "scale_huge": {"scale": 3e4},
    "scale_zero_softcap": {"scale": 0.0, "softcap": 1.0},
    "dropout": {"dropout_p": 0.1},
    "dropout_half": {"dropout_p": 0.5},
    "dropout_all": {"dropout_p": 1.0},
    "dropout_tiny": {"dropout_p": 1e-12},
    "dropout_causal": {"dropout_p": 0.3, "is_causal": True, "query_offset": 17},
    "dropout_softcap": {"dropout_p": 0.3, "softcap": 1.0},
}


def _options() -> Iterator[Case]:
    """Every option by itself, and beside a mask."""
    for i, (option, values) in enumerate(OPTIONS.items()):
        for k, way in enumerate(WAYS):
            name = f"option/{option}/{way}"
            if way != "phases" or i % 3 == 0:
                yield _case(name, WAYS[way], {"options": values}, _some(name, 2))
            if (i + k) % 2 == 0 and way != "phases":
                mask = ROTATED_MASKS[(i + k // 2) % len(ROTATED_MASKS)]
                yield _case(name + "/masked", WAYS[way], mask, {"options": values}, _some(name + "m", 1))
    for k, way in enumerate(SHORT_WAYS):
        mask = {"mask": "bias" if k % 2 else "bool"}
        seeds = {"options": {"dropout_p": 0.4}, "seeds": "batch"}
        yield _case(f"option/seeds/{way}", WAYS[way], seeds)
        yield _case(f"option/seeds/{way}/masked", WAYS[way], {"batch": (3,)}, mask, seeds)


def _sinks() -> Iterator[Case]:
    for i, sinks in enumerate(("heads", "batch", "float32", "minus_inf", "large")):
        for k, way in enumerate(SHORT_WAYS):
            name = f"sinks/{sinks}/{way}"
            yield _case(name, WAYS[way], {"sinks": sinks, "heads": 3}, _some(name, 2))
            mask = ROTATED_MASKS[(i * 3 + k) % len(ROTATED_MASKS)]
            more: Options = {"sinks": sinks, "grads": (("o", "s"), ("olwk", "ms"))}
            yield _case(name + "/masked", WAYS[way], mask, more, _some(name + "m", 1))
        yield _case(f"sinks/{sinks}/no_keys", {"lengths": (4, 0), "sinks": sinks, "batch": (2,)})
        if sinks != "batch":
            yield _case(
                f"sinks/{sinks}/no_heads", {"lengths": (9, 17), "sinks": sinks, "heads": 0, "batch": ()}
            )


def _groups() -> Iterator[Case]:
    """Query heads that share key heads, around the blocks of rows that a group makes."""
    for i, (heads, key_heads) in enumerate(((4, 2), (2, 1), (4, 1), (8, 2), (7, 1), (14, 2), (6, 3))):
        for j, lengths in enumerate(((1, 300), (2, 530), (3, 37), (8, 140), (9, 140), (12, 70), (16, 300))):
            name = f"groups/{heads}-{key_heads}/{lengths[0]}x{lengths[1]}"
            fields = {"heads": heads, "key_heads": key_heads, "lengths": lengths, "batch": (1 + i % 2,)}
            yield _case(name, fields, _some(name, 2))
            mask = ROTATED_MASKS[(i * 7 + j) % len(ROTATED_MASKS)]
            yield _case(name + "/masked", fields, mask, _some(name + "m", 1))
        name = f"groups/{heads}-{key_heads}/tiles"
        fields = {"heads": heads, "key_heads": key_heads, "lengths": (40, 230)}
        yield _case(name, fields, _some(name, 2))
        for dims in ("bhqk", "qk", "h1k", "hq1"):
            yield _case(f"{name}/{dims}", fields, {"mask": "bias", "mask_dims": dims}, _some(name + dims, 2))
    # Rows of a group in blocks of 96: 4 x 24, 5 x 19, 3 x 32, 6 x 16, and one more or less.
    for heads, query_len in (
        (4, 24),
        (4, 25),
        (5, 19),
        (5, 20),
        (3, 32),
        (3, 31),
        (6, 16),
        (6, 17),
        (12, 8),
        (13, 8),
    ):
        fields = {"heads": heads, "key_heads": 1, "lengths": (query_len, 1030), "dims": (8, 8)}
        yield _case(f"groups/rows/{heads}x{query_len}", fields)
        yield _case(f"groups/rows/{heads}x{query_len}/bias", fields, {"mask": "bias", "mask_dims": "hqk"})
    for dims in ("qk", "bhqk", "k"):
        fields = {"heads": 4, "key_heads": 2, "lengths": (513, 520), "mask": "bias", "mask_dims": dims}
        yield _case(f"groups/phases/{dims}", fields, {"dtypes": ("f32", "bf16")})
    yield _case("groups/phases", {"heads": 4, "key_heads": 2, "lengths": (513, 520)})


def _ranks_and_broadcasts() -> Iterator[Case]:
    ones: tuple[tuple[str, ...], ...] = (
        ("key.batch",),
        ("key.batch", "value.batch"),
        ("query.batch",),
        ("value.no_batch",),
        ("key.no_batch", "value.no_batch"),
        ("key.heads", "value.heads"),
        ("key.heads",),
        ("value.heads",),
        ("query.heads",),
        ("query.heads", "query.batch"),
        ("key.heads", "key.batch", "value.heads", "value.batch"),
    )
    for way in SHORT_WAYS:
        for i, parts in enumerate(ones):
            name = f"broadcast/{'+'.join(parts)}/{way}"
            mask = ROTATED_MASKS[i] if (i + len(way)) % 2 else {}
            yield _case(name, WAYS[way], {"ones": parts, "batch": (2,), "heads": 3}, mask, _some(name, 2))
        yield _case(f"rank/2/{way}", WAYS[way], {"heads": 0, "batch": ()})
        yield _case(
            f"rank/2/{way}/bias", WAYS[way], {"heads": 0, "batch": (), "mask": "bias", "mask_dims": "qk"}
        )
        yield _case(f"rank/3/{way}", WAYS[way], {"batch": (), "heads": 3})
        yield _case(f"rank/5/{way}", WAYS[way], {"batch": (2, 2)})
        for dims in ("ahqk", "a11k", "b1q1", "1"):
            fields = {"batch": (2, 3), "mask": "bias", "mask_dims": dims, "sinks": "batch"}
            yield _case(f"rank/5/{way}/{dims}", WAYS[way], fields, _some(way + dims, 2))
        name = f"rank/5/{way}/broadcast"
        yield _case(
            name, WAYS[way], {"batch": (2, 3), "ones": ("key.batch", "value.no_batch")}, _some(name, 2)
        )
    empty: dict[str, Options] = {
        "no_batch": {"batch": (0,)},
        "no_heads": {"heads": 0, "batch": ()},
        "no_rows": {"lengths": (0, 7)},
        "no_rows_many_keys": {"lengths": (0, 300)},
        "no_keys": {"lengths": (7, 0)},
        "no_keys_many_rows": {"lengths": (40, 0)},
        "no_keys_bias": {"lengths": (7, 0), "mask": "bias"},
        "no_value": {"dims": (8, 0), "lengths": (20, 150)},
        "one": {"lengths": (1, 1), "dims": (1, 1), "heads": 1},
    }
    for name, nothing in empty.items():
        yield _case(f"empty/{name}", nothing)


def _layouts() -> Iterator[Case]:
    for i, layout in enumerate(
        ("heads_last", "transposed", "every_second", "padded_rows", "unaligned", "expanded_batch")
    ):
        for k, way in enumerate(SHORT_WAYS):
            name = f"layout/{layout}/{way}"
            yield _case(name, WAYS[way], {"layout": layout}, _some(name, 3))
            mask = ROTATED_MASKS[(i + k) % len(ROTATED_MASKS)]
            dims = {"dims": ((33, 40), (64, 64), (80, 17))[(i + k) % 3]}
            yield _case(name + "/masked", WAYS[way], {"layout": layout}, dims, mask, _some(name + "m", 1))
    # Values that lie as if packed, and those that would but for one thing.
    for dim in (8, 16, 32, 64):
        for layout in ("contiguous", "unaligned"):
            for lengths in ((40, 70), (40, 1100)):
                name = f"layout/in_place/{dim}/{layout}/{lengths[1]}"
                yield _case(name, {"dims": (8, dim), "lengths": lengths, "heads": 1, "layout": layout})


def _gradients() -> Iterator[Case]:
    """Every set of incoming gradients, and each wanted one alone."""
    incoming = [
        "".join(letter for bit, letter in enumerate(OUTPUTS) if number >> bit & 1) for number in range(1, 16)
    ]
    wanted = ("q", "k", "v", "m", "s", "qk", "qv", "kv", "ms", "vm", "qm", "ks", "qkv", "qkvm", "kvms")
    full: Options = {"mask": "bias", "sinks": "heads"}
    for k, way in enumerate(SHORT_WAYS):
        for i, letters in enumerate(incoming):
            name = f"grads/{letters}/{way}"
            yield _case(name, WAYS[way], {"grads": ((letters, INPUTS),)}, _some(name, 2))
            passes = {"grads": ((letters, INPUTS), (letters, wanted[(i + k) % len(wanted)]))}
            extra = ROTATED_MASKS[(i + k) % len(ROTATED_MASKS)] if i % 2 else full
            yield _case(name + "/masked", WAYS[way], extra, passes, _some(name + "m", 1))
        for letters in wanted:
            name = f"wanted/{letters}/{way}"
            passes = {"grads": (("o", letters), ("lk", letters))}
            yield _case(name, WAYS[way], full, {"mask_dims": "hqk"}, passes, _some(name, 2))
        for layout in (
            "expanded",
            "transposed",
            "heads_last",
            "every_second",
            "expanded_rows",
            "padded_rows",
        ):
            name = f"grads/layout/{layout}/{way}"
            both = {"grad_layout": layout, "grads": (("o", INPUTS), ("olwk", INPUTS))}
            yield _case(name, WAYS[way], both, _some(name, 2))


def _poison() -> Iterator[Case]:
    """NaN and infinities, where a mask hides them and where none does."""
    hiding: dict[str, Options] = {
        "open": {},
        "padding": {"mask": "padding", "mask_dims": "1k"},
        "holes": {"mask": "holes", "mask_dims": "b1qk"},
        "bias": {"mask": "bias_padding", "mask_dims": "qk"},
        "dead": {"mask": "dead_rows"},
        "causal": {"options": {"is_causal": True, "query_offset": 2}},
        "window": {"options": {"window_left": 11, "window_right": 3, "query_offset": 5}},
    }
    number = 0
    for way in SHORT_WAYS:
        for hides, mask in hiding.items():
            for target in ("key", "value", "query", "grad", "key+value"):
                number += 1
                what = ("nan", "inf", "-inf")[number % 3]
                place = "middle" if target in ("query", "grad") or number % 4 == 0 else "last"
                change = tuple(f"{t}:{place}:{what}" for t in target.split("+"))
                name = f"poison/{target}/{place}/{what}/{hides}/{way}"
                extra = {"options": {"dropout_p": 0.3}} if number % 7 == 0 else {}
                cap = {"options": {"softcap": 4.0}} if number % 11 == 0 else {}
                yield _case(name, WAYS[way], {"change": change}, mask, extra, cap, _some(name, 1))
        for target in ("grad_lse", "grad_weights", "grad_key_mass"):
            name = f"poison/{target}/{way}"
            fields = {"change": (f"{target}:last:nan",), "grads": (("olwk", INPUTS),), "mask": "dead_rows"}
            yield _case(name, WAYS[way], fields, _some(name, 1))
        # Keys far from 0 are centred where elements have 16 bits.
        for shift in ("3", "30", "1000"):
            yield _case(f"shift/key/{shift}/{way}", WAYS[way], {"change": (f"key:all:{shift}",)})
        name = f"shift/both/{way}"
        yield _case(name, WAYS[way], {"change": ("key:all:-9", "query:all:5", "value:all:2")}, _some(name, 2))
        name = f"shift/nan/{way}"
        yield _case(name, WAYS[way], {"change": ("key:all:9", "key:first:nan")}, _some(name, 3))


def _threads() -> Iterator[Case]:
    """Heads that threads share evenly and not: packing once, whole chains or phases of segments."""
    lengths = ((64, 200), (97, 128), (513, 520), (300, 40), (12, 600), (8, 520), (20, 1100), (40, 1100))
    for i, (batch, heads) in enumerate(((1, 1), (1, 2), (3, 1), (2, 2), (1, 5), (7, 1), (2, 4), (4, 4))):
        for j, (query_len, key_len) in enumerate(lengths):
            if batch * heads > 8 and query_len > 500:
                continue
            name = f"threads/{batch}x{heads}/{query_len}x{key_len}"
            fields = {"batch": (batch,), "heads": heads, "lengths": (query_len, key_len), "dims": (16, 8)}
            yield _case(name, fields, _some(name, 2 if query_len < 500 else 1))
            mask = ROTATED_MASKS[(i * 3 + j) % len(ROTATED_MASKS)]
            yield _case(name + "/masked", fields, mask, _some(name + "m", 1))
    for batch, heads in ((1, 1), (1, 3), (1, 5)):
        for query_len, key_len in ((511, 512), (512, 512), (512, 511), (767, 770), (769, 768)):
            name = f"threads/{batch}x{heads}/{query_len}x{key_len}/segments"
            fields = {"batch": (batch,), "heads": heads, "lengths": (query_len, key_len), "dims": (8, 8)}
            few = {"grads": (("o", "qkv"),)}
            yield _case(name, fields, few, _some(name, 1))
            causal = {"options": {"is_causal": True}, "grads": (("ok", "qkv"),)}
            yield _case(name + "/causal", fields, causal, _some(name + "c", 1))
    # Copies of the gradient of a mask that heads or batches share: by its size and by how many share it.
    copies = (
        ((2, 3), (40, 70), "qk"),
        ((4, 8), (40, 140), "qk"),
        ((4, 8), (40, 70), "hqk"),
        ((4, 8), (40, 140), "b1qk"),
        ((8, 5), (12, 130), "11qk"),
        ((3, 7), (17, 17), "k"),
        ((1, 3), (511, 513), "qk"),
        ((1, 3), (513, 513), "qk"),
        ((3, 2), (513, 513), "hqk"),
        ((6, 6), (8, 300), "qk"),
        ((6, 6), (8, 300), "h1k"),
        ((6, 6), (8, 300), "q1"),
    )
    for (batch, heads), (query_len, key_len), dims in copies:
        name = f"copies/{batch}x{heads}/{query_len}x{key_len}/{dims}"
        fields = {"batch": (batch,), "heads": heads, "lengths": (query_len, key_len), "dims": (8, 8)}
        for kind in ("bias", "bias_minus_inf"):
            yield _case(f"{name}/{kind}", fields, {"mask": kind, "mask_dims": dims}, _some(name + kind, 2))


def _large() -> Iterator[Case]:
    """What only long tensors reach; in few dtypes, and with few gradients."""
    one: Options = {"heads": 1, "grads": (("o", INPUTS),)}
    for query_len in (17, 40):
        for key_len in (2048, 2049, 4096, 4097):
            fields = {"lengths": (query_len, key_len), "dims": (8, 8)}
            passes = {"grads": (("ow", INPUTS),)}
            yield _case(f"large/weights/{query_len}x{key_len}", one, fields, passes)
            masked = {"mask": "holes", "mask_dims": "qk", "options": {"dropout_p": 0.2}}
            yield _case(f"large/weights/{query_len}x{key_len}/masked", one, fields, passes, masked)
    # The gradients of broadcast inputs go through slices of 8 MB.
    slices = {"batch": (3,), "dims": (64, 64), "ones": ("key.batch", "value.batch")}
    yield _case("large/slices/few_rows", one, slices, {"lengths": (2, 16500), "dtypes": ("f32", "bf16")})
    yield _case("large/slices/tiles", one, slices, {"lengths": (9, 16500), "dtypes": ("f32",)})
    queries: Options = {"batch": (3,), "dims": (64, 64), "ones": ("query.batch",), "lengths": (33000, 2)}
    yield _case("large/slices/rows", one, queries, {"dtypes": ("f32",)})
    # Gradients that are streamed past the caches: 8 MB of keys and values.
    for name, key_len in (("below", 32000), ("beyond", 33000)):
        fields = {"lengths": (2, key_len), "dims": (64, 64), "dtypes": ("bf16", "f16")}
        yield _case(f"large/streamed/{name}", one, fields)
    yield _case("large/streamed/f32", one, {"lengths": (3, 17000), "dims": (64, 64), "dtypes": ("f32",)})
    yield _case("large/streamed/f64", one, {"lengths": (1, 9000), "dims": (64, 64), "dtypes": ("f64",)})
    yield _case("large/streamed/odd", one, {"lengths": (2, 33000), "dims": (72, 60), "dtypes": ("bf16",)})
    bias = {"mask": "bias", "mask_dims": "qk", "grads": (("o", "qkvm"),), "dtypes": ("f32",)}
    yield _case("large/copies", {"heads": 4, "lengths": (1040, 1400), "dims": (8, 8)}, bias)


def _random_case(name: str) -> Case:
    """A call drawn from all arguments at once."""
    draw = random.Random(stable_number(name))

    def one_of(*choices: Any) -> Any:
        return draw.choice(choices)

    way = one_of("few_rows", "short", "short", "tiles", "few", "long")
    query_len, key_len = {
        "few_rows": (draw.randint(1, 8), draw.randint(129, 900)),
        "short": (draw.randint(1, 130), draw.randint(1, 128)),
        "tiles": (draw.randint(9, 110), draw.randint(129, 400)),
        "few": (draw.randint(1, 16), draw.randint(1, 600)),
        "long": (draw.randint(17, 40), draw.randint(1000, 1200)),
    }[way]
    dims = one_of(8, 16, 32, draw.randint(1, 40)), one_of(8, 16, 32, draw.randint(1, 40))
    key_heads, group = draw.randint(1, 2), one_of(1, 1, 1, 2, 3)
    options: Options = {}
    if draw.random() < 0.3:
        options["is_causal"] = True
    if draw.random() < 0.25:
        options["window_left"] = draw.randint(0, key_len)
    if draw.random() < 0.2:
        options["window_right"] = draw.randint(0, key_len)
    if options:
        options["query_offset"] = one_of(0, key_len - query_len, draw.randint(-query_len, key_len))
    if draw.random() < 0.2:
        options["softcap"] = one_of(0.5, 3.0, 30.0)
    if draw.random() < 0.25:
        options["dropout_p"] = one_of(0.1, 0.5, draw.random())
    if draw.random() < 0.25:
        options["scale"] = one_of(0.0, -0.3, 1.0, 10.0, draw.random())
    mask = one_of("", "", *MASKS)
    shape = "".join(one_of(letter, letter, "1") for letter in "bhqk")
    if mask in ("padding", "left_padding", "holes", "blocks"):
        shape = shape[:3] + "k"
    passes = []
    for _ in range(2):
        incoming = "".join(letter for letter in OUTPUTS if draw.random() < 0.5) or "o"
        passes.append((incoming, one_of(INPUTS, "".join(c for c in INPUTS if draw.random() < 0.5) or "q")))
    change: tuple[str, ...] = ()
    if draw.random() < 0.15:
        target = one_of("query", "key", "value", "grad")
        change = (f"{target}:{one_of('first', 'middle', 'last')}:{one_of('nan', 'inf', '-inf')}",)
    ones = one_of((), (), (), ("key.batch", "value.batch"), ("query.batch",), ("value.no_batch",))
    return Case(
        name,
        (query_len, key_len),
        dims,
        one_of((1,), (1,), (2,), (1, 2)) if way == "long" else one_of((1,), (2,), (3,), (2, 2)),
        key_heads * group,
        key_heads,
        ones,
        mask,
        shape,
        draw.random() < 0.4,
        one_of("contiguous", "contiguous", "transposed", "every_second", "expanded_batch"),
        one_of("", "", "", "heads", "batch", "float32", "minus_inf"),
        one_of(
            "contiguous", "contiguous", "contiguous", "heads_last", "transposed", "padded_rows", "unaligned"
        ),
        one_of("contiguous", "contiguous", "expanded", "transposed", "heads_last"),
        change,
        "",
        options,
        tuple(passes),
        **_some(name, 2),
    )


def _drawn() -> Iterator[Case]:
    for number in range(400):
        yield _random_case(f"random/{number}")


LISTS = (
    *(_key_lengths, _query_lengths, _dims, _masks, _far_rows, _options, _sinks, _groups),
    *(_ranks_and_broadcasts, _layouts, _gradients, _poison, _threads, _large, _drawn),
)


def all_cases() -> list[Case]:
    """Every case, in order; a name stands for one case."""
    cases = [case for make in LISTS for case in make()]
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"a name twice: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return cases

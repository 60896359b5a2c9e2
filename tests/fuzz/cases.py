"""What the fuzzer draws: a call over the whole argument space, as plain data that can be shrunk and printed.

``draw_case(seed, number)`` is the same case for ever; :meth:`Case.build` makes its tensors, and
:meth:`Case.snippet` writes the program that makes them, with nothing of the fuzzer in it.
"""

import math
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from program import heading, tensors_of
from torch import Tensor

Shape = tuple[int, ...]

DTYPES = {"float64": torch.float64, "float32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
OPS = ("sdpa", "sdpa_with_weights", "sdpa_with_lse", "sdpa_with_key_mass")
INPUTS = ("query", "key", "value", "attn_mask", "sinks")
SIDE = {"sdpa_with_weights": "weights", "sdpa_with_lse": "lse", "sdpa_with_key_mass": "key_mass"}

#: Ways in which the same numbers lie in memory, as the text of an expression over ``t``.
LAYOUTS = {
    "transposed": "t.transpose(-2, -1).contiguous().transpose(-2, -1)",
    "heads_last": "t.transpose(-2, -3).contiguous().transpose(-2, -3)",
    "every_second": "torch.stack([t, t * 0 + 7 if t.is_floating_point() else ~t], -1).flatten(-2)[..., ::2]",
    "sliced": "torch.nn.functional.pad(t, (3, 2), value=1)[..., 3:-2]",
    "rows_sliced": "torch.nn.functional.pad(t, (0, 0, 2, 1), value=1)[..., 2:-1, :]",
    "offset": "torch.nn.functional.pad(t.reshape(-1), (1, 0))[1:].view(t.shape)",
    "batch_first_last": "t.movedim(0, -1).contiguous().movedim(-1, 0)",
    # These change the numbers: all of a dim are its first.
    "expanded_batch": "t[:1].expand_as(t)",
    "expanded_heads": "t[..., :1, :, :].expand_as(t)",
    "expanded_rows": "t[..., :1, :].expand_as(t)",
    "expanded_all": "t.flatten()[0].expand(t.shape)",
}
_LEAST_DIMS = {"heads_last": 3, "expanded_heads": 3, "expanded_all": 0, "offset": 0, "every_second": 1}
_NEEDS_ONE = ("expanded_all",)  # of numbers


def layout_fits(layout: str, shape: Shape) -> bool:
    return len(shape) >= _LEAST_DIMS.get(layout, 2) and (layout not in _NEEDS_ONE or math.prod(shape) > 0)


#: Masks as the text of an expression over ``shape`` and ``numbers(seed, shape)``; bool where it compares.
MASKS = {
    "bool": "numbers(seed, shape) < 0.3",
    "sparse": "numbers(seed, shape) > 1.0",
    "padding": "torch.arange(shape[-1]) < 1 + numbers(seed, (*shape[:-1], 1)).abs() * shape[-1] / 2",
    "rows_off": "numbers(seed, (*shape[:-1], 1)).expand(shape) < 0.3",
    "all_true": "torch.ones(shape, dtype=torch.bool)",
    "all_false": "torch.zeros(shape, dtype=torch.bool)",
    "bias": "numbers(seed, shape)",
    "bias_zero": "numbers(seed, shape) * 0",
    "bias_minus_inf": "numbers(seed, shape).masked_fill(numbers(seed + 1, shape) > 0.5, -inf)",
    "bias_rows_minus_inf": "numbers(seed, shape).masked_fill("
    "numbers(seed + 1, (*shape[:-1], 1)) > 0.3, -inf)",
    "bias_all_minus_inf": "torch.full(shape, -inf)",
    "bias_lowest": "(numbers(seed, shape) > 0.5) * torch.finfo({dtype}).min",
    "bias_rows_lowest": "(numbers(seed, (*shape[:-1], 1)) > 0.3).expand(shape) * torch.finfo({dtype}).min",
    "bias_max": "(numbers(seed, shape) > 1.0) * torch.finfo({dtype}).max",
    "bias_large": "numbers(seed, shape) * 300",
    "bias_huge": "numbers(seed, shape) * 3e4",
    "bias_far": "(numbers(seed, shape) > 0.5) * -6e4",
}
_NEED_A_ROW = ("padding", "rows_off", "bias_rows_minus_inf", "bias_rows_lowest")
SINKS = {
    "normal": "numbers(seed, shape)",
    "large": "numbers(seed, shape) * 100",
    "minus_inf": "numbers(seed, shape).masked_fill(numbers(seed + 1, shape) > 0, -inf)",
    "low": "numbers(seed, shape) * 0 - 3000",
    "3000": "numbers(seed, shape) * 0 + 3000",
    "plus_inf": "numbers(seed, shape).masked_fill(numbers(seed + 1, shape) > 0, inf)",
    "nan": "numbers(seed, shape).masked_fill(numbers(seed + 1, shape) > 0, nan)",
}


@dataclass(frozen=True)
class Plant:
    """One number put at ``place`` (a fraction of the flat tensor) of a tensor."""

    tensor: str  # query, key, value, attn_mask, grad_output, grad_lse, grad_weights, grad_key_mass
    place: float
    what: str  # nan, inf, -inf, or a number

    def index(self, count: int) -> int:
        """Where among ``count`` numbers."""
        return min(int(self.place * count), count - 1)


@dataclass(frozen=True)
class Case:
    """One call of one op, forward and backward."""

    op: str = "sdpa"
    dtype: str = "float32"
    batch: Shape = ()
    heads: int = 1  # 0: no dim for them
    group: int = 1  # query heads for each of `heads` key heads
    lq: int = 3
    lk: int = 3
    d: int = 4
    dv: int = 4
    gqa: bool = False
    ones: tuple[str, ...] = ()  # dims of size 1 that broadcast: "key.h", "value.0" (a batch dim)
    dropped: tuple[tuple[str, int], ...] = ()  # leading dims that a tensor lacks
    layouts: tuple[tuple[str, str], ...] = ()  # tensor, layout
    mask: str = ""
    mask_ones: tuple[int, ...] = ()  # dims from the end (1: keys, 2: rows, 3: heads, 4...) of size 1
    mask_dropped: int = 0
    mask_float32: bool = False
    sinks: str = ""
    sinks_float32: bool = False
    sinks_batch: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    plants: tuple[Plant, ...] = ()
    spread: float = 1.0  # of query and key
    incoming: tuple[str, ...] = ("output",)  # outputs through which a gradient comes in; () none
    wanted: tuple[str, ...] = INPUTS
    threads: int = 1
    seed: int = 0
    place: int = 0  # which batch of the dropout draw this is: a packed call draws one for each sequence

    # Shapes

    @property
    def query_heads(self) -> int:
        """Hq, 1 where there is no such dim."""
        return max(self.heads, 1) * self.group

    @property
    def lead(self) -> Shape:
        """The leading dims of the output."""
        return (*self.batch, self.query_heads) if self.heads else ()

    @property
    def scores(self) -> int:
        """How many scores there are."""
        return math.prod(self.lead) * self.lq * self.lk

    def shape_of(self, name: str) -> Shape:
        """The shape of query, key or value."""
        if not self.heads:
            lead: Shape = ()
        else:
            heads = self.query_heads if name == "query" or not self.gqa else self.heads
            lead = (*self.batch, heads)
            lead = tuple(
                1 if f"{name}.{'h' if i == len(lead) - 1 else i}" in self.ones else size
                for i, size in enumerate(lead)
            )
            keep_heads = 1 if self.gqa else 0
            lead = lead[min(dict(self.dropped).get(name, 0), len(lead) - keep_heads) :]
        tail = {"query": (self.lq, self.d), "key": (self.lk, self.d), "value": (self.lk, self.dv)}[name]
        return (*lead, *tail)

    def mask_shape(self) -> Shape:
        """The shape of the mask."""
        full = (*self.lead, self.lq, self.lk)
        sizes = tuple(1 if len(full) - i in self.mask_ones else size for i, size in enumerate(full))
        return sizes[min(self.mask_dropped, len(sizes)) :]

    def sinks_shape(self) -> Shape:
        """The shape of the sinks."""
        return (*self.batch, self.query_heads) if self.sinks_batch else (self.query_heads,)

    @property
    def valid(self) -> bool:
        """Whether the parts fit together: not every shrunk case does."""
        shapes = [self.shape_of(n) for n in ("query", "key", "value")]
        if not self.gqa and self.heads and self.group != 1:
            return False
        if not self.heads and (self.batch or self.gqa or self.group != 1):
            return False
        if self.gqa and (any(len(s) < 3 for s in shapes) or any(o.endswith(".h") for o in self.ones)):
            return False
        # Size 0 broadcasts from 1 only where somebody has it; a dim that is 1 in all tensors is not ours.
        if self.heads:
            lead = torch.broadcast_shapes(*(s[:-2] for s in shapes)) if not self.gqa else None
            if lead is not None and lead != self.lead:
                return False
            if self.gqa:
                batch = torch.broadcast_shapes(*(s[:-3] for s in shapes))
                if batch != self.batch:
                    return False
        for name, layout in self.layouts:
            shape = {"attn_mask": self.mask_shape, "sinks": self.sinks_shape}.get(name)
            if name in ("query", "key", "value"):
                full = self.shape_of(name)
            elif shape is not None:
                full = shape()
            else:
                full = self.output_shapes().get(name.removeprefix("grad_"), ())
            if not layout_fits(layout, full):
                return False
        return self.mask not in _NEED_A_ROW or bool(self.mask_shape())

    def output_shapes(self) -> dict[str, Shape]:
        """The shapes of the op's outputs, by name."""
        shapes: dict[str, Shape] = {"output": (*self.lead, self.lq, self.dv)}
        side = {
            "weights": (*self.lead, self.lq, self.lk),
            "lse": (*self.lead, self.lq),
            "key_mass": (*self.lead, self.lk),
        }
        if self.op in SIDE:
            shapes[SIDE[self.op]] = side[SIDE[self.op]]
        return shapes

    # Tensors, as the program that makes them

    def program(self) -> list[str]:
        """The statements that make ``query``, ``key`` ... and ``grad_output`` ..., one tensor each."""
        dtype, lines = f"torch.{self.dtype}", []
        layouts = dict(self.layouts)

        def add(name: str, text: str, shape: Shape, out: str | None, fill: bool = True) -> None:
            lines.append(f"{name} = {text}" if out is None else f"{name} = ({text}).to({out})")
            count = math.prod(shape)
            for plant in self.plants:
                if plant.tensor == name and count and fill:
                    lines.append(f"{name}.view(-1)[{plant.index(count)}] = {plant.what}")
            if name in layouts:
                lines.append(f"t = {name}")
                lines.append(f"{name} = {LAYOUTS[layouts[name]]}")

        spread = f" * {self.spread!r}" if self.spread != 1.0 else ""
        for i, name in enumerate(("query", "key", "value")):
            shape = self.shape_of(name)
            scaled = spread if name != "value" else ""
            add(name, f"numbers({self.seed + i}, {shape}){scaled}", shape, dtype)
        if self.mask:
            shape = self.mask_shape()
            mask_dtype = "torch.float32" if self.mask_float32 else dtype
            text = MASKS[self.mask].format(dtype=mask_dtype)
            text = text.replace("seed", str(self.seed + 3)).replace("shape", str(shape))
            is_float = self.mask.startswith("bias")
            if is_float:
                add("attn_mask", f"{text}", shape, f"{mask_dtype}).contiguous(", is_float)
            else:
                add("attn_mask", f"({text}).expand({shape}).contiguous()", shape, None, is_float)
        if self.sinks:
            shape = self.sinks_shape()
            text = SINKS[self.sinks].replace("seed", str(self.seed + 5)).replace("shape", str(shape))
            add("sinks", text, shape, "torch.float32" if self.sinks_float32 else dtype)
        for i, (name, shape) in enumerate(self.output_shapes().items()):
            if name in self.incoming:
                out = dtype
                if name == "lse" and self.dtype != "float64":
                    out = "torch.float32"
                add(f"grad_{name}", f"numbers({self.seed + 7 + i}, {shape})", shape, out)
        return lines

    def build(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return tensors_of(self.program())

    def keywords(self) -> dict[str, Any]:
        """The options that are no tensors."""
        return {**({"enable_gqa": True} if self.gqa else {}), **dict(self.options)}

    def snippet(self, result: str = "", capability: str = "", told: str = "") -> str:
        """A program that shows this case, with nothing of the fuzzer in it."""
        keywords = {**self.keywords()}
        text = "".join(f", {name}={value!r}" for name, value in keywords.items())
        tensors = "".join(f", {n}={n}" for n, on in (("attn_mask", self.mask), ("sinks", self.sinks)) if on)
        floating = [n for n in self.differentiable() if n in self.wanted]
        outputs = list(self.output_shapes())
        lines = [
            *heading(result, capability, told),
            *self.program(),
            "for module in (attn_ext, reference):",
        ]
        body = [f"torch.set_num_threads({self.threads})" if self.threads > 1 else ""]
        seed = ""
        if keywords.get("dropout_p"):
            body += [f"torch.manual_seed({self.seed})"]
            body += ["seed = torch.randint(2**63 - 1, ())", f"torch.manual_seed({self.seed})"]
            seed = " **({'dropout_seed': seed} if module is reference else {}),"
        if floating and self.incoming:
            body += [f"inputs = [t.detach().requires_grad_() for t in ({', '.join(floating)},)]"]
            body += [f"({', '.join(floating)},) = inputs"]
        call = f"module.{self.op}(query, key, value{tensors}{text}"
        body += [f"outputs = {call},{seed})" if seed else f"outputs = {call})"]
        body += [
            "outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs",
            f"print(module.__name__, dict(zip({outputs}, outputs)))",
        ]
        if floating and self.incoming:
            used = [i for i, n in enumerate(outputs) if n in self.incoming]
            given = ", ".join(f"grad_{outputs[i]}.to(outputs[{i}].dtype)" for i in used)
            body += [
                f"grads = torch.autograd.grad([outputs[i] for i in {used}], inputs, [{given}], "
                "allow_unused=True)",
                f"print(module.__name__, dict(zip({floating}, grads)))",
            ]
        return "\n".join([*lines, *("    " + b for b in body if b)])

    def differentiable(self) -> tuple[str, ...]:
        """The names of the floating tensors among the inputs."""
        names = ["query", "key", "value"]
        names += ["attn_mask"] if self.mask.startswith("bias") else []
        names += ["sinks"] if self.sinks else []
        return tuple(names)

    def features(self) -> set[str]:
        """Names of what is special about it, for ``--without``."""
        options = dict(self.options)
        found = {f"mask:{self.mask}"} if self.mask else set()
        found |= {f"sinks:{self.sinks}", "sinks"} if self.sinks else set()
        found |= {f"plant:{p.tensor}" for p in self.plants}
        found |= {f"plant:{p.what}" for p in self.plants}
        found |= set(options)
        if any(p.tensor.startswith("grad_") for p in self.plants):
            found.add("plant:grad")
        if self.d == 0:
            found.add("dim:0")
        if 0 < options.get("softcap", 0) < 1e-37:
            found.add("softcap:tiny")
        return found | {self.op, self.dtype}

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return "Case(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed) + ")"


# Drawing -----------------------------------------------------------------------------------------

_LENGTHS = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 18, 23, 31, 32, 33)
_LONG = (63, 64, 65, 96, 97, 127, 128, 129, 130, 160, 200, 257)
_VERY_LONG = (511, 513, 1023, 1024, 1025, 1040, 1100, 2049)
DIMS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 15, 16, 16, 17, 24, 31, 32, 33, 40, 64, 65, 80)
VALUES = ("nan", "nan", "inf", "-inf", "1e30", "-6e4")


def draw_case(seed: int, number: int) -> Case:
    """Case ``number`` of a run with ``seed``."""
    draw = random.Random(f"{seed}/{number}")
    while True:
        case = _draw(draw)
        if case.valid and case.scores * (case.d + case.dv + 8) < 6e5:
            return case


def _lengths(draw: random.Random) -> tuple[int, int]:
    kind = draw.random()
    if kind < 0.7:
        return draw.choice(_LENGTHS), draw.choice(_LENGTHS)
    if kind < 0.8:
        return draw.choice(_LENGTHS), draw.choice(_LONG)
    if kind < 0.9:
        return draw.choice(_LONG), draw.choice(_LENGTHS)
    if kind < 0.96:
        return draw.choice(_LONG), draw.choice(_LONG)
    return draw.choice(_LENGTHS), draw.choice(_VERY_LONG)


def _options(draw: random.Random, lq: int, lk: int) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {}

    def sometimes(chance: float, name: str, *choices: Any) -> None:
        if draw.random() < chance:
            options[name] = draw.choice(choices)

    sometimes(0.25, "is_causal", True)
    near = (0, 1, 2, draw.randint(0, lk + 1), lk, 2**40)
    sometimes(0.15, "window_left", *near)
    sometimes(0.12, "window_right", *near)
    offsets = (lk - lq, -1, 1, draw.randint(-lq - 2, lk + 2), -lq - 3, lk + 3, 2**40, -(2**40))
    sometimes(0.5 if options else 0.02, "query_offset", *offsets)
    sometimes(0.25, "scale", 0.0, -0.3, 1.0, -1e-3, 1e-6, 30.0, 1e-30, 7.0, -50.0)
    sometimes(0.2, "softcap", 0.5, 3.0, 30.0, 1e-3, 1e-30, 1e-46, 1e-300, 1e6, 1e30)
    sometimes(0.2, "dropout_p", 0.1, 0.5, 0.9, 1.0, 1e-12)
    if options.get("scale") == 1e-30 and options.get("softcap", 1.0) < 1e-30:
        del options["scale"]  # a softcap below 1e-30 counts as 1e-30, which only scores as small could tell
    return tuple(options.items())


def _layouts(draw: random.Random, names: list[str]) -> tuple[tuple[str, str], ...]:
    if draw.random() < 0.5:
        return ()
    if draw.random() < 0.4:
        same = draw.choice(tuple(LAYOUTS))
        return tuple((name, same) for name in names[:3])
    return tuple((name, draw.choice(tuple(LAYOUTS))) for name in names if draw.random() < 0.35)


def _draw(draw: random.Random) -> Case:
    lq, lk = _lengths(draw)
    d, dv = draw.choice(DIMS), draw.choice(DIMS)
    batch = draw.choice(((), (), (1,), (1,), (2,), (2,), (3,), (0,), (2, 2), (1, 3), (2, 1)))
    heads = draw.choice((1, 1, 2, 2, 3, 4))
    gqa = draw.random() < 0.3
    group = draw.choice((1, 2, 3)) if gqa else 1
    if draw.random() < 0.08:
        batch, heads, gqa, group = (), 0, False, 1
    ones, dropped = [], []
    for name in ("query", "key", "value"):
        if draw.random() < 0.2 and heads:
            places = [str(i) for i in range(len(batch))] + ([] if gqa else ["h"])
            ones += [f"{name}.{place}" for place in places if draw.random() < 0.6]
        if draw.random() < 0.1 and heads:
            dropped.append((name, draw.randint(1, len(batch) + 1)))
    op = draw.choice(OPS)
    mask = draw.choice(tuple(MASKS)) if draw.random() < 0.5 else ""
    sinks = draw.choice(("normal", "normal", *SINKS)) if draw.random() < 0.2 else ""
    outputs = ["output", *([SIDE[op]] if op in SIDE else [])]
    incoming = tuple(name for name in outputs if draw.random() < 0.75)
    names = ["query", "key", "value", *(f"grad_{name}" for name in incoming)]
    names += ["attn_mask"] if mask else []
    plants = []
    if draw.random() < 0.25:
        targets = ["query", "key", "value", "key", "value", *(f"grad_{name}" for name in incoming)]
        targets += ["attn_mask"] if mask.startswith("bias") else []
        for _ in range(draw.choice((1, 1, 2, 4))):
            plants.append(
                Plant(draw.choice(targets), draw.choice((0.0, 1.0, draw.random())), draw.choice(VALUES))
            )
    wanted = INPUTS if draw.random() < 0.6 else tuple(n for n in INPUTS if draw.random() < 0.5)
    dtype = draw.choice(("float32", "float32", "float64", "bfloat16", "bfloat16", "float16"))
    case = Case(
        op=op, dtype=dtype, batch=batch, heads=heads, group=group, lq=lq, lk=lk, d=d, dv=dv, gqa=gqa,
        ones=tuple(ones), dropped=tuple(dropped), mask=mask,
        mask_ones=tuple(n for n in range(1, 6) if draw.random() < 0.3),
        mask_dropped=draw.choice((0, 0, 0, 1, 2, 3, 4, 5)), mask_float32=draw.random() < 0.3,
        sinks=sinks, sinks_float32=draw.random() < 0.3, sinks_batch=draw.random() < 0.15 and heads > 0,
        options=_options(draw, lq, lk), plants=tuple(plants),
        spread=draw.choice((1.0, 1.0, 1.0, 1.0, 4.0, 30.0, 1e-3)), incoming=incoming, wanted=wanted,
        threads=draw.choice((1, 1, 2, 3, 4)), seed=draw.randrange(10**6),
    )  # fmt: skip
    layouts = []
    for name, layout in _layouts(draw, names):
        shapes = {f"grad_{n}": s for n, s in case.output_shapes().items()}
        shapes |= {"attn_mask": case.mask_shape()} | {n: case.shape_of(n) for n in ("query", "key", "value")}
        if layout_fits(layout, shapes[name]):
            layouts.append((name, layout))
    return replace(case, layouts=tuple(layouts))


__all__ = ["DTYPES", "INPUTS", "OPS", "SIDE", "Case", "Plant", "draw_case"]

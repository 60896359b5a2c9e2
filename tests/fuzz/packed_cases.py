"""What the fuzzer draws of packed sequences: a call as plain data, as :mod:`cases` has it of other ops."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cases import DIMS, LAYOUTS, SINKS, VALUES, Plant, layout_fits
from program import heading, tensors_of
from torch import Tensor

INPUTS = ("query", "key", "value", "sinks")


@dataclass(frozen=True)
class Part:
    """A sequence, and the rows of nobody behind it."""

    lq: int = 3
    lk: int = 3
    hole_q: int = 0
    hole_k: int = 0
    offset: int = 0  # read where the case gives offsets


def sinks_of(case: Any) -> list[str]:
    """The statement that makes the sinks, if there are any."""
    if not case.sinks:
        return []
    text = SINKS[case.sinks].replace("seed", str(case.seed + 9))
    text = text.replace("shape", str((case.heads * case.group,)))
    return [f"sinks = ({text}).to(torch.{'float32' if case.sinks_float32 else case.dtype})"]


def with_defaults(case: Any, skipped: Sequence[str]) -> Iterator[Any]:
    """The case with each field, but those skipped, as it is by default."""
    for f in fields(case):
        if f.name not in skipped and getattr(case, f.name) != f.default:
            yield replace(case, **{f.name: f.default})


def with_less(case: Any, names: Sequence[str]) -> Iterator[Any]:
    """The case without each of the items of these fields."""
    for name in names:
        items = getattr(case, name)
        for i in range(len(items)):
            yield replace(case, **{name: items[:i] + items[i + 1 :]})


def with_smaller(case: Any, names: Sequence[str]) -> Iterator[Any]:
    """The case with smaller numbers, of at least 1, in these fields."""
    for name in names:
        size = getattr(case, name)
        for to in dict.fromkeys((1, size // 2, size - 1)):
            if 1 <= to < size:
                yield replace(case, **{name: to})


@dataclass(frozen=True)
class PackedCase:
    """One call of ``sdpa_packed_with_lse``, forward and backward."""

    dtype: str = "float32"
    parts: tuple[Part, ...] = (Part(),)
    before: int = 0  # rows in front of the first sequence, of query and key
    offsets: bool = False  # query_offsets is given
    holes: bool = False  # seqlens_q and seqlens_k are given; else holes belong to their sequence
    starts: str = "int64"  # dtype of cu_seqlens; "strided" is int64 with a stride
    heads: int = 1
    group: int = 1
    gqa: bool = False
    one_key_head: bool = False  # which broadcasts
    d: int = 4
    dv: int = 4
    layouts: tuple[tuple[str, str], ...] = ()
    sinks: str = ""
    sinks_float32: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    plants: tuple[Plant, ...] = ()
    nan_outside: bool = False  # rows of nobody hold NaN
    spread: float = 1.0
    incoming: tuple[str, ...] = ("output",)
    wanted: tuple[str, ...] = INPUTS
    threads: int = 1
    seed: int = 0

    @property
    def sequences(self) -> list[tuple[slice, slice, int]]:
        """Rows, keys and offset of each."""
        found, row, key = [], self.before, self.before
        for part in self.parts:
            lq = part.lq if self.holes else part.lq + part.hole_q
            lk = part.lk if self.holes else part.lk + part.hole_k
            offset = part.offset if self.offsets else lk - lq
            found.append((slice(row, row + lq), slice(key, key + lk), offset))
            row, key = row + part.lq + part.hole_q, key + part.lk + part.hole_k
        return found

    def rows(self, side: str) -> list[int]:
        """Where the sequences begin in query ("q") or key ("k"), and where the last ends with its hole."""
        ends = [self.before]
        for part in self.parts:
            ends.append(ends[-1] + getattr(part, f"l{side}") + getattr(part, f"hole_{side}"))
        return ends

    @property
    def sequence_options(self) -> tuple[tuple[str, Any], ...]:
        """Of the call of one sequence."""
        return self.options

    @property
    def scores(self) -> int:
        """How many scores there are."""
        sizes = [(rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _ in self.sequences]
        return self.heads * self.group * sum(sizes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs, and of what comes in for the outputs."""
        total_q, total_k = self.rows("q")[-1] + 2, self.rows("k")[-1] + 1
        heads, keys = self.heads * self.group, 1 if self.one_key_head else self.heads
        return {
            "query": (total_q, heads, self.d),
            "key": (total_k, keys, self.d),
            "value": (total_k, keys, self.dv),
            "grad_output": (total_q, heads, self.dv),
            "grad_lse": (heads, total_q),
        }

    @property
    def valid(self) -> bool:
        """Whether the parts fit together."""
        fits = all(layout_fits(layout, self.shapes()[name]) for name, layout in self.layouts)
        return fits and (self.gqa or self.group == 1) and not (self.gqa and self.one_key_head)

    def features(self) -> set[str]:
        """What ``--without`` may leave out."""
        found = {self.dtype, *(f"plant:{p.what}" for p in self.plants), *(name for name, _ in self.options)}
        names = ("sinks", "holes", "offsets", "gqa", "nan_outside")
        return (
            found
            | {name for name in names if getattr(self, name)}
            | {"layout"} & {"layout" if self.layouts else ""}
        )

    # Tensors, as the program that makes them

    def program(self) -> list[str]:
        """The statements that make every tensor of the call."""
        lines = []
        for i, (name, shape) in enumerate(self.shapes().items()):
            if name.startswith("grad_") and name.removeprefix("grad_") not in self.incoming:
                continue
            wide = name == "grad_lse" and self.dtype != "float64"
            scale = f" * {self.spread!r}" if self.spread != 1.0 and name in ("query", "key") else ""
            dtype = "float32" if wide else self.dtype
            lines.append(f"{name} = (numbers({self.seed + i}, {shape}){scale}).to(torch.{dtype})")
            count = math.prod(shape)
            lines += [
                f"{name}.view(-1)[{p.index(count)}] = {p.what}"
                for p in self.plants
                if p.tensor == name and count
            ]
            lines += self._outside(name)
            if name in dict(self.layouts):
                lines += [f"t = {name}", f"{name} = {LAYOUTS[dict(self.layouts)[name]]}"]
        return lines + sinks_of(self) + self._lengths()

    def _outside(self, name: str) -> list[str]:
        if not self.nan_outside:
            return []
        side = 1 if name in ("key", "value") else 0
        inside = [n for sequence in self.sequences for n in range(sequence[side].start, sequence[side].stop)]
        shape = self.shapes()[name]
        rows = shape[1] if name == "grad_lse" else shape[0]
        left = sorted(set(range(rows)) - set(inside))
        return [f"{name}[{':, ' if name == 'grad_lse' else ''}{left}] = nan"] if left else []

    def _lengths(self) -> list[str]:
        def integers(numbers: list[int], far: bool = False) -> str:
            dtype = "int32" if self.starts == "int32" and not far else "int64"
            text = f"torch.tensor({numbers}, dtype=torch.{dtype})"
            return f"torch.stack([{text}] * 2, -1)[:, 0]" if self.starts == "strided" else text

        lines = [f"cu_seqlens_{side} = {integers(self.rows(side))}" for side in "qk"]
        if self.holes:
            lines += [f"seqlens_{s} = {integers([getattr(p, f'l{s}') for p in self.parts])}" for s in "qk"]
        if self.offsets:
            lines.append(f"query_offsets = {integers([p.offset for p in self.parts], far=True)}")
        return lines

    def build(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return tensors_of(self.program())

    def keywords(self) -> dict[str, Any]:
        """The options that are no tensors."""
        return {**({"enable_gqa": True} if self.gqa else {}), **dict(self.options)}

    def differentiated(self) -> list[str]:
        """Inputs of which the gradient is taken."""
        return [n for n in self.wanted if n != "sinks" or self.sinks] if self.incoming else []

    def snippet(self, result: str = "", capability: str = "", told: str = "") -> str:
        """A program that shows this case, with nothing of the fuzzer in it."""
        given = [line.split(" = ")[0] for line in self._lengths()] + (["sinks"] if self.sinks else [])
        options = "".join(f", {n}={n}" for n in given)
        options += "".join(f", {n}={v!r}" for n, v in self.keywords().items())
        wanted = self.differentiated()
        lines = [
            *heading(result, capability, told),
            *self.program(),
            f"torch.set_num_threads({self.threads})",
            "for module in (attn_ext, reference):",
            f"    torch.manual_seed({self.seed})",
            f"    seed = {{'dropout_seed': torch.randint(2**63 - 1, ())}}; torch.manual_seed({self.seed})",
            *(f"    {n} = {n}.detach().requires_grad_()" for n in wanted),
            f"    outputs = module.sdpa_packed_with_lse(query, key, value{options}, "
            "**(seed if module is reference else {}))",
            "    print(module.__name__, *outputs)",
        ]
        if wanted:
            names = ("output", "lse")
            used = [i for i in range(2) if names[i] in self.incoming]
            into = "".join(f"grad_{names[i]}.to(outputs[{i}].dtype), " for i in used)
            through = "".join(f"outputs[{i}], " for i in used)
            lines.append(
                f"    if any(t.requires_grad for t in ({through})):\n"
                f"        print(torch.autograd.grad(({through}), ({''.join(f'{n}, ' for n in wanted)}), "
                f"({into}), allow_unused=True))"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return "PackedCase(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed) + ")"

    def smaller(self) -> Iterator["PackedCase"]:
        """Simpler cases, the greatest steps first."""
        half = len(self.parts) // 2
        for parts in (self.parts[:half], self.parts[half:]):
            if parts != self.parts:
                yield replace(self, parts=parts)
        yield from with_less(self, ("parts",))
        yield from with_defaults(self, ("dtype", "parts", "seed", "group", "heads", "d", "dv"))
        if self.gqa or self.group > 1:
            yield replace(self, gqa=False, group=1)
        yield from with_less(self, ("layouts", "plants", "options", "incoming", "wanted"))
        yield from with_smaller(self, ("d", "dv", "heads", "threads"))
        for i, part in enumerate(self.parts):
            for name in ("lq", "lk", "hole_q", "hole_k", "offset"):
                size = getattr(part, name)
                for to in dict.fromkeys((0, 1, size // 2, size - 1)):
                    if 0 <= to < size or (to == 0 and size < 0):
                        changed = replace(part, **{name: to})
                        yield replace(self, parts=(*self.parts[:i], changed, *self.parts[i + 1 :]))


# Drawing -----------------------------------------------------------------------------------------

_FEW = (0, 0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18, 31, 33)
MANY = (63, 64, 65, 97, 127, 128, 129, 130, 160, 200, 257)
_MOST = (511, 513, 1023, 1025, 1100, 2049)


def draw_packed_case(seed: int, number: int) -> PackedCase:
    """Case ``number`` of a run with ``seed``."""
    draw = random.Random(f"packed {seed}/{number}")
    while True:
        case = _draw(draw)
        if case.valid and case.scores * (case.d + case.dv + 8) < 8e5:
            return case


def draw_length(draw: random.Random, most: tuple[int, ...] = _MOST) -> int:
    kind = draw.random()
    return draw.choice(_FEW if kind < 0.75 else MANY if kind < 0.95 else most)


def _part(draw: random.Random, gaps: bool) -> Part:
    lq, lk = draw_length(draw, MANY), draw_length(draw)
    if draw.random() < 0.3:
        lk = lq
    holes = (draw.choice((0, 0, 1, 3)), draw.choice((0, 0, 1, 3))) if gaps else (0, 0)
    offset = draw.choice((0, lk - lq, -1, 1, lk + 2, -lq - 2, 2**40, -(2**40), draw.randint(-3, 9)))
    return Part(lq, lk, *holes, offset)


def draw_options(draw: random.Random) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {}

    def sometimes(chance: float, name: str, *choices: Any) -> None:
        if draw.random() < chance:
            options[name] = draw.choice(choices)

    near = (0, 1, 2, 7, 40, 2**40)
    sometimes(0.35, "is_causal", True)
    sometimes(0.2, "window_left", *near)
    sometimes(0.15, "window_right", *near)
    sometimes(0.2, "scale", 0.0, -0.3, 1.0, 1e-6, 7.0)
    sometimes(0.2, "softcap", 0.5, 3.0, 30.0, 1e6)
    sometimes(0.2, "dropout_p", 0.1, 0.5, 0.9, 1.0)
    return tuple(options.items())


def draw_plants(draw: random.Random, names: Sequence[str]) -> tuple[Plant, ...]:
    plants = []
    if draw.random() < 0.3:
        for _ in range(draw.choice((1, 1, 2, 4))):
            place = draw.choice((0.0, 1.0, draw.random(), draw.random()))
            plants.append(Plant(draw.choice(names), place, draw.choice(VALUES)))
    return tuple(plants)


def _draw(draw: random.Random) -> PackedCase:
    gqa = draw.random() < 0.4
    gaps = draw.random() < 0.4
    count = draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 20))
    incoming = tuple(name for name in ("output", "lse") if draw.random() < 0.7)
    names = ["query", "key", "value", *(f"grad_{name}" for name in incoming)]
    plants = draw_plants(draw, names)
    layouts = ()
    if draw.random() < 0.4:
        layouts = tuple((name, draw.choice(tuple(LAYOUTS))) for name in names if draw.random() < 0.5)
    case = PackedCase(
        dtype=draw.choice(("float32", "float32", "float64", "bfloat16", "bfloat16", "float16")),
        parts=tuple(_part(draw, gaps) for _ in range(count)),
        before=draw.choice((0, 0, 0, 1, 5)), offsets=draw.random() < 0.3, holes=gaps and draw.random() < 0.8,
        starts=draw.choice(("int32", "int64", "strided")), heads=draw.choice((1, 1, 2, 2, 3, 4)),
        group=draw.choice((1, 2, 3)) if gqa else 1, gqa=gqa,
        one_key_head=not gqa and draw.random() < 0.1, d=draw.choice(DIMS), dv=draw.choice(DIMS),
        sinks=draw.choice(("normal", "normal", *SINKS)) if draw.random() < 0.25 else "",
        sinks_float32=draw.random() < 0.3, options=draw_options(draw), plants=plants,
        nan_outside=draw.random() < 0.4, spread=draw.choice((1.0, 1.0, 1.0, 4.0, 1e-3)), incoming=incoming,
        wanted=INPUTS if draw.random() < 0.6 else tuple(n for n in INPUTS if draw.random() < 0.5),
        threads=draw.choice((1, 1, 2, 3, 4)), seed=draw.randrange(10**6),
    )  # fmt: skip
    fitting = tuple((n, layout) for n, layout in layouts if layout_fits(layout, case.shapes()[n]))
    return replace(case, layouts=fitting)


__all__ = [
    *(
        "INPUTS",
        "MANY",
        "PackedCase",
        "Part",
        "draw_length",
        "draw_options",
        "draw_packed_case",
        "draw_plants",
    ),
    *("sinks_of", "with_defaults", "with_less", "with_smaller"),
]

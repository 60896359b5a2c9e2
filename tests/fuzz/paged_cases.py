"""What the fuzzer draws of paged caches: a call as plain data, as :mod:`cases` has it of other ops."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from cases import DIMS, LAYOUTS, SINKS, Plant, layout_fits
from packed_cases import (
    MANY,
    draw_length,
    draw_options,
    draw_plants,
    sinks_of,
    with_defaults,
    with_less,
    with_smaller,
)
from program import heading, tensors_of
from torch import Tensor

#: What pages may hold beside the query's own dtype, by that.
STORED = {
    "float64": ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    "float32": ("bfloat16", "float16", "int8", "float8_e4m3fn"),
    "bfloat16": ("int8", "float8_e4m3fn"),
    "float16": ("int8", "float8_e4m3fn"),
}
NARROW = ("int8", "float8_e4m3fn")

#: Ways in which the same pages lie in memory, as the text of an expression over ``t``.
PAGE_LAYOUTS = {
    "heads_first": "t.transpose(1, 2).contiguous().transpose(1, 2)",
    "pages_last": "t.transpose(0, 2).contiguous().transpose(0, 2)",
    "every_second": "torch.cat([t[:, None], t[:, None]], 1).flatten(0, 1)[::2]",
    "beside": "torch.cat([t, t], 2)[:, :, : t.shape[2]]",
    "sliced": "torch.cat([t, t], 3)[..., : t.shape[3]]",
    "rows_sliced": "torch.cat([t[:, :1], t, t[:, :1]], 1)[:, 1:-1]",
    "offset": "torch.cat([t.new_empty(1), t.reshape(-1)])[1:].view(t.shape)",
}

#: How rows are put into pages that nothing is to be rounded in, as the text of an expression over ``t``.
_DIRECTLY = {"int8": "(t * 40).nan_to_num(0).clamp(-128, 127)", "float8_e4m3fn": "(t * 8).clamp(-448, 448)"}


@dataclass(frozen=True)
class PagedCase:
    """One call of ``sdpa_paged``, and of ``cache_write_`` before it where the pages are written."""

    dtype: str = "float32"
    stored: str = ""  # what the pages hold; "": the query's dtype
    lengths: tuple[tuple[int, int], ...] = ((1, 3),)  # query rows and keys of each sequence
    page: int = 2
    shared: int = 0  # the first pages, so many, are those of every sequence
    spare: int = 0  # pages of no sequence
    columns: int = 0  # of the table, beyond those that the longest sequence needs
    beyond: int = -1  # what the table holds there
    starts: bool = True  # cu_seqlens_q is given; else each sequence has one row
    around: tuple[int, int] = (0, 0)  # query rows of nobody, before and after all others
    integers: str = "int64"  # of tables, lengths and slots; "strided" is int64 with a stride
    heads: int = 1
    group: int = 1
    gqa: bool = False
    d: int = 4
    dv: int = 4
    layouts: tuple[tuple[str, str], ...] = ()  # of query, key and value, and of their pages
    key_scale: str = ""  # of "one", "row", or "head"
    value_scale: str = ""
    factor: float = 0.05  # about what the scales are
    zero_scales: bool = False  # some of them are 0
    sinks: str = ""
    sinks_float32: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    plants: tuple[Plant, ...] = ()  # in query, and in the rows of key and value
    spread: float = 1.0
    written: bool = False  # by cache_write_
    rows_dtype: str = ""  # of the rows to be written; "": the query's
    skipped: int = 0  # of these the ones that have no slot
    lse: bool = True  # sdpa_paged_with_lse
    gradient: bool = False  # one is asked for, which there is not
    threads: int = 1
    seed: int = 0

    # What is asked of the call of one sequence alone, as in PackedCase
    one_key_head = False
    incoming = ()
    wanted = ()

    @property
    def rows(self) -> list[int]:
        """Query rows of each sequence."""
        return [rows if self.starts else 1 for rows, _ in self.lengths]

    @property
    def keys(self) -> list[int]:
        """Keys of each sequence."""
        return [keys for _, keys in self.lengths]

    @property
    def sequences(self) -> list[tuple[slice, slice, int]]:
        """Rows of each, its keys among those of all sequences one after the other, and offset."""
        found, row, key = [], self.before, 0
        for lq, lk in zip(self.rows, self.keys, strict=True):
            found.append((slice(row, row + lq), slice(key, key + lk), lk - lq))
            row, key = row + lq, key + lk
        return found

    @property
    def sequence_options(self) -> tuple[tuple[str, Any], ...]:
        """Of the call of one sequence, whose default is not to be causal."""
        return (("is_causal", True), *self.options)

    @property
    def before(self) -> int:
        """Query rows in front of the first sequence."""
        return self.around[0] if self.starts else 0

    @property
    def scores(self) -> int:
        """How many scores there are."""
        return self.heads * self.group * sum(q * k for q, k in zip(self.rows, self.keys, strict=True))

    # Pages

    def pages(self) -> list[tuple[int, int, int]]:
        """Of each sequence the pages that it shares, and begin and end of its own in the order of all."""
        used = [-(-keys // self.page) for keys in self.keys]
        end = max((min(self.shared, n) for n in used), default=0)
        found = []
        for n in used:
            common = min(self.shared, n)
            found.append((common, end, end + n - common))
            end += n - common
        return found

    @property
    def count(self) -> int:
        """Pages of the cache."""
        common = max((common for common, _, _ in self.pages()), default=0)
        return max((end for _, _, end in self.pages()), default=common) + self.spare

    @property
    def slots(self) -> int:
        """Slots that some sequence has."""
        own, shared = 0, 0
        for keys, (common, _, _) in zip(self.keys, self.pages(), strict=True):
            in_common = min(keys, common * self.page)
            own, shared = own + keys - in_common, max(shared, in_common)
        return own + shared

    @property
    def stored_dtype(self) -> str:
        """What the pages hold."""
        return self.stored or self.dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs, and of the outputs."""
        rows, heads = sum(self.rows) + (sum(self.around) if self.starts else 0), self.heads * self.group
        of_key = (self.count, self.page, self.heads)
        new = (self.slots + (self.skipped if self.written else 0), self.heads)
        shapes = {"query": (rows, heads, self.d), "key": (*new, self.d), "value": (*new, self.dv)}
        shapes |= {"key_pages": (*of_key, self.d), "value_pages": (*of_key, self.dv)}
        return shapes | {"output": (rows, heads, self.dv), "lse": (heads, rows)}

    @property
    def valid(self) -> bool:
        """Whether the parts fit together."""
        shapes = self.shapes()
        fits = all(
            layout in PAGE_LAYOUTS if name.endswith("pages") else layout_fits(layout, shapes[name])
            for name, layout in self.layouts
        )
        holds = {"", self.dtype, *STORED[self.dtype]}
        rows = self.rows_dtype or self.dtype
        return (
            fits
            and (self.gqa or self.group == 1)
            and self.stored in holds
            and self.stored_dtype in (rows, *STORED[rows])
        )

    def features(self) -> set[str]:
        """What ``--without`` may leave out."""
        names = ("sinks", "sinks_float32", "gqa", "written", "shared", "skipped", "gradient", "layouts")
        found = {self.dtype, f"stored:{self.stored_dtype}", *(name for name, _ in self.options)}
        found |= {f"plant:{p.what}" for p in self.plants} | {n for n in names if getattr(self, n)}
        return found | {f"scale:{kind}" for kind in (self.key_scale, self.value_scale) if kind}

    # Tensors, as the program that makes them

    def program(self) -> list[str]:
        """The statements that make every tensor of the calls."""
        lines = [*self._tables(), *self._rows("query"), *sinks_of(self)]
        for name in ("key", "value"):
            lines += [*self._rows(name), *self._pages(name), *self._scale(name)]
        return lines

    def _tables(self) -> list[str]:
        size = (
            f"({len(self.lengths)}, {self.columns + max((-(-k // self.page) for k in self.keys), default=0)})"
        )
        generator = f"generator=torch.Generator().manual_seed({self.seed})"
        lines = [f"t = torch.randperm({self.count}, {generator})"]
        lines.append(f"block_table = torch.full({size}, {self.beyond})")
        for i, (common, begin, end) in enumerate(self.pages()):
            pages = f"torch.cat([t[:{common}], t[{begin}:{end}]])" if common else f"t[{begin}:{end}]"
            lines.append(f"block_table[{i}, :{common + end - begin}] = {pages}")
        lines += [
            "slot_mapping = torch.cat([torch.arange(0), *(",
            f"    row[torch.arange(keys) // {self.page}] * {self.page} + torch.arange(keys) % {self.page}",
            f"    for row, keys in zip(block_table, {self.keys}))]).unique()",
        ]
        if self.written:
            none = f"torch.full(({self.skipped},), -1)"
            lines.append(f"slot_mapping = torch.cat([slot_mapping, {none}])")
            lines.append(f"slot_mapping = slot_mapping[torch.randperm(len(slot_mapping), {generator})]")
        lines.append(f"seqlens_k = torch.tensor({self.keys}, dtype=torch.int64)")
        if self.starts:
            starts = [self.before, *(s[0].stop for s in self.sequences)]
            lines.append(f"cu_seqlens_q = torch.tensor({starts})")
        return lines + [f"{n} = {self._integers(n)}" for n in self._integer_names() if self._integers(n)]

    def _integer_names(self) -> list[str]:
        names = ["block_table", "seqlens_k", *(["slot_mapping"] if self.written else [])]
        return names + (["cu_seqlens_q"] if self.starts else [])

    def _integers(self, name: str) -> str:
        return {"int32": f"{name}.int()", "strided": f"torch.stack([{name}] * 2, -1)[..., 0]"}.get(
            self.integers, ""
        )

    def _rows(self, name: str) -> list[str]:
        place, shape = ("query", "key", "value").index(name), self.shapes()[name]
        scale = f" * {self.spread!r}" if self.spread != 1.0 and name != "value" else ""
        dtype = (self.rows_dtype if name != "query" else "") or self.dtype
        lines = [f"{name} = (numbers({self.seed + place}, {shape}){scale}).to(torch.{dtype})"]
        count = shape[0] * shape[1] * shape[2]
        plants = [p for p in self.plants if p.tensor == name and count]
        lines += [f"{name}.view(-1)[{p.index(count)}] = {p.what}" for p in plants]
        if name == "query" and self.before + self.around[1] and self.starts:
            lines.append(f"query[{[*range(self.before), *range(shape[0] - self.around[1], shape[0])]}] = nan")
        layout = dict(self.layouts).get(name)
        return [*lines, f"t = {name}", f"{name} = {LAYOUTS[layout]}"] if layout else lines

    def _pages(self, name: str) -> list[str]:
        """Rows of no sequence hold NaN, or the largest number."""
        pages, dtype = f"{name}_pages", self.stored_dtype
        fill = "127" if dtype == "int8" else "nan"
        lines = [f"{pages} = torch.full({self.shapes()[pages]}, {fill}).to(torch.{dtype})"]
        if not self.written:
            new = _DIRECTLY.get(dtype, "t")
            lines += [f"t = {name}", f"{pages}.flatten(0, 1)[slot_mapping] = ({new}).to(torch.{dtype})"]
        layout = dict(self.layouts).get(pages)
        return [*lines, f"t = {pages}", f"{pages} = {PAGE_LAYOUTS[layout]}"] if layout else lines

    def _scale(self, name: str) -> list[str]:
        kind = getattr(self, f"{name}_scale")
        if not kind:
            return []
        seed = self.seed + (20 if name == "key" else 21)
        slots = f"({self.slots}, {self.heads}, 1)"
        shape = {"one": "()", "head": f"({self.heads},)", "row": slots}[kind]
        numbers = f"(numbers({seed}, {shape}).abs() + 0.5).float() * {self.factor!r}"
        if self.zero_scales:
            numbers = f"{numbers} * (numbers({seed + 2}, {shape}) > -1)"
        if kind != "row":
            return [f"{name}_scale = {numbers}"]
        full = f"torch.full(({self.count}, {self.page}, {self.heads}, 1), nan)"
        used = "slot_mapping[slot_mapping >= 0].long()"
        return [f"{name}_scale = {full}", f"{name}_scale.flatten(0, 1)[{used}] = {numbers}"]

    def build(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return tensors_of(self.program())

    def keywords(self) -> dict[str, Any]:
        """The options that are no tensors."""
        return {**({"enable_gqa": True} if self.gqa else {}), **dict(self.options)}

    def given(self) -> list[str]:
        """The tensors that the call takes."""
        names = ["query", "key_pages", "value_pages", "block_table", "seqlens_k"]
        names += ["cu_seqlens_q"] if self.starts else []
        return names + [n for n in ("sinks", "key_scale", "value_scale") if getattr(self, n)]

    def snippet(self, result: str = "", capability: str = "", told: str = "") -> str:
        """A program that shows this case, with nothing of the fuzzer in it."""
        given = ", ".join(f"{n}={n}" for n in self.given())
        options = "".join(f", {n}={v!r}" for n, v in self.keywords().items())
        scales = "".join(f", {n}={n}" for n in ("key_scale", "value_scale") if getattr(self, n))
        op = "sdpa_paged_with_lse" if self.lse else "sdpa_paged"
        write = f"attn_ext.cache_write_(key_pages, value_pages, key, value, slot_mapping{scales})"
        lines = [
            *heading(result, capability, told),
            *self.program(),
            f"torch.set_num_threads({self.threads})",
            *([write, "print(key_pages, value_pages)"] if self.written else []),
            "for module in (attn_ext, reference):",
            f"    print(module.__name__, module.{op}({given}{options}))",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return "PagedCase(" + ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed) + ")"

    def smaller(self) -> Iterator["PagedCase"]:
        """Simpler cases, the greatest steps first."""
        half = len(self.lengths) // 2
        for lengths in (self.lengths[:half], self.lengths[half:]):
            if lengths != self.lengths:
                yield replace(self, lengths=lengths)
        yield from with_less(self, ("lengths",))
        yield from with_defaults(self, ("dtype", "lengths", "page", "seed", "group", "heads", "d", "dv"))
        if self.gqa or self.group > 1:
            yield replace(self, gqa=False, group=1)
        yield from with_less(self, ("layouts", "plants", "options"))
        yield from with_smaller(self, ("page", "d", "dv", "heads", "threads", "shared", "spare", "skipped"))
        for i, length in enumerate(self.lengths):
            for side, size in enumerate(length):
                for to in dict.fromkeys((0, 1, size // 2, size - 1)):
                    if 0 <= to < size:
                        changed = (to, length[1]) if side == 0 else (length[0], to)
                        yield replace(self, lengths=(*self.lengths[:i], changed, *self.lengths[i + 1 :]))


# Drawing -----------------------------------------------------------------------------------------

PAGES = (1, 2, 3, 5, 7, 8, 15, 16, 16, 17, 24, 32, 64, 128, 256)


def draw_paged_case(seed: int, number: int) -> PagedCase:
    """Case ``number`` of a run with ``seed``."""
    draw = random.Random(f"paged {seed}/{number}")
    while True:
        case = _draw(draw)
        held = case.count * case.page * case.heads * (case.d + case.dv)
        if case.valid and case.scores * (case.d + case.dv + 8) < 8e5 and held < 1e6:
            return case


def _lengths(draw: random.Random, page: int) -> tuple[int, int]:
    keys = draw_length(draw)
    if draw.random() < 0.3:
        keys = max(0, page * draw.choice((1, 1, 2, 3)) + draw.choice((-1, 0, 1)))
    rows = draw.choice((1, 1, 1, 2, 4, keys, draw_length(draw, MANY)))
    return rows, keys


def _draw(draw: random.Random) -> PagedCase:
    dtype = draw.choice(("float32", "float32", "float64", "bfloat16", "bfloat16", "float16"))
    stored = draw.choice(STORED[dtype]) if draw.random() < 0.5 else ""
    page, gqa = draw.choice(PAGES), draw.random() < 0.4
    count = draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 20))
    scaled = draw.random() < (0.8 if stored in NARROW else 0.05)
    kinds = ("", "one", "head", "head", "row", "row")
    options = {n: v for n, v in draw_options(draw) if n not in ("dropout_p", "is_causal")}
    if draw.random() < 0.35:
        options["is_causal"] = False
    written = draw.random() < 0.5
    wider = [t for t in STORED if (stored or dtype) in (t, *STORED[t])]
    case = PagedCase(
        dtype=dtype, stored=stored, lengths=tuple(_lengths(draw, page) for _ in range(count)), page=page,
        shared=draw.choice((0, 0, 1, 2, 5)), spare=draw.choice((0, 1, 3)), columns=draw.choice((0, 0, 1, 4)),
        beyond=draw.choice((-1, -1, 0, 10**6)), starts=draw.random() < 0.8,
        around=(draw.choice((0, 0, 1, 5)), draw.choice((0, 0, 2))),
        integers=draw.choice(("int32", "int64", "strided")), heads=draw.choice((1, 1, 2, 2, 3, 4)),
        group=draw.choice((1, 2, 3, 8)) if gqa else 1, gqa=gqa, d=draw.choice(DIMS), dv=draw.choice(DIMS),
        key_scale=draw.choice(kinds) if scaled else "", value_scale=draw.choice(kinds) if scaled else "",
        factor=draw.choice((0.05, 0.05, 1.0, 1e-3, 300.0)), zero_scales=draw.random() < 0.1,
        sinks=draw.choice(("normal", "normal", *SINKS)) if draw.random() < 0.25 else "",
        sinks_float32=draw.random() < 0.3, options=tuple(options.items()),
        plants=draw_plants(draw, ("query", "key", "value")), spread=draw.choice((1.0, 1.0, 1.0, 4.0, 1e-3)),
        written=written, rows_dtype=draw.choice(("", "", *wider)), skipped=draw.choice((0, 1, 3)) * written,
        lse=draw.random() < 0.7, gradient=draw.random() < 0.1, threads=draw.choice((1, 1, 2, 3, 4)),
        seed=draw.randrange(10**6),
    )  # fmt: skip
    layouts = []
    if draw.random() < 0.4:
        for name in ("query", "key", "value", "key_pages", "value_pages"):
            layout = draw.choice(tuple(PAGE_LAYOUTS if name.endswith("pages") else LAYOUTS))
            fits = name.endswith("pages") or layout_fits(layout, case.shapes()[name])
            if fits and draw.random() < 0.5:
                layouts.append((name, layout))
    return replace(case, layouts=tuple(layouts))


__all__ = ["PagedCase", "draw_paged_case"]

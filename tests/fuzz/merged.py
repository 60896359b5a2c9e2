"""Parts of the keys put together by ``merge_partials``, held against the oracle's call of all keys.

``fuzz.py --calls merged`` draws the cases: a call of ``sdpa_with_lse``, and where its keys are cut. A row may
see nothing in a part, or in any. The first part has the sinks. No visible score is infinite: a log-sum-exp of
inf does not tell which keys have such a score, and one of -inf says that a row has seen none. Nor does NaN or
Inf come from a sink, or to one as a gradient: the output of a row that sees its sink alone is 0 whatever that
is, but a factor of it when it is merged.

Gradients of the parts are rounded to their tensor's dtype before they are summed: so there is no mask
narrower than the query, nor are there numbers that leave the range of float16 in one part and come back in
another.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cases import Case, Plant, draw_case
from check import Mismatch, check_as, smaller_cases
from program import heading
from subjects import Results, run
from torch import Tensor

import attn_ext


@dataclass(frozen=True)
class MergedCase:
    """A call over all keys, and the number of keys in each part but the last, which has the others."""

    whole: Case = field(default_factory=lambda: Case(op="sdpa_with_lse"))
    parts: tuple[int, ...] = (1,)
    wide: bool = False  # the parts' lses are made float64

    @property
    def threads(self) -> int:
        """In which the parts are computed."""
        return self.whole.threads

    @property
    def valid(self) -> bool:
        """Whether parts can make the call."""
        whole = self.whole
        return (
            whole.valid
            and whole.op == "sdpa_with_lse"
            and "dropout_p" not in dict(whole.options)
            and whole.sinks not in ("plus_inf", "nan")
            and not (whole.mask_float32 and whole.dtype == "float64")
            and not (whole.mask == "bias_huge" and whole.dtype == "float16")  # some of it is inf
            and all(map(self._may_hold, whole.plants))
        )

    def _may_hold(self, plant: Plant) -> bool:
        if plant.what == "-6e4":
            return self.whole.dtype != "float16"
        if plant.tensor in ("query", "key"):
            return plant.what == "nan"
        if plant.tensor == "attn_mask":
            return plant.what in ("nan", "-inf")
        return plant.tensor == "value" or not self.whole.sinks

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Begin and end of each part."""
        ends = [0]
        for size in self.parts:
            ends.append(min(ends[-1] + size, self.whole.lk))
        return list(zip(ends, [*ends[1:], self.whole.lk], strict=True))

    @property
    def cuts_mask(self) -> bool:
        """Whether the mask has a column for each key."""
        return self.whole.mask_shape()[-1:] == (self.whole.lk,)

    def features(self) -> set[str]:
        """What ``--without`` may leave out."""
        return self.whole.features() | ({"wide"} if self.wide else set())

    def build(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return self.whole.build()

    def snippet(self, result: str = "", capability: str = "", told: str = "") -> str:
        """A program that shows this case, with nothing of the fuzzer in it."""
        whole = self.whole
        options = {n: v for n, v in whole.keywords().items() if n != "query_offset"}
        text = "".join(f", {n}={v!r}" for n, v in options.items())
        text += f", query_offset={dict(whole.options).get('query_offset', 0)}"
        all_of_it = "".join(
            f", {n}={n}" for n, on in (("attn_mask", whole.mask), ("sinks", whole.sinks)) if on
        )
        mask = "attn_mask[..., begin:end]" if self.cuts_mask else "attn_mask"
        of_part = f", attn_mask={mask}" if whole.mask else ""
        of_part += ", sinks=None if outputs else sinks" if whole.sinks else ""
        wanted = [n for n in whole.differentiable() if n in whole.wanted] if whole.incoming else []
        through = ", ".join(n for n in ("output", "lse") if n in whole.incoming)
        given = ", ".join(f"grad_{n}" for n in ("output", "lse") if n in whole.incoming)
        lines = [
            *heading(result, capability, told),
            *whole.program(),
            *(f"{n} = {n}.detach().requires_grad_()" for n in wanted),
            f"torch.set_num_threads({self.threads})",
            "outputs, lses = [], []",
            f"for begin, end in {self.bounds}:",
            "    part = query, key[..., begin:end, :], value[..., begin:end, :]",
            f"    output, lse = attn_ext.sdpa_with_lse(*part{of_part}{text} - begin)",
            "    outputs.append(output)",
            f"    lses.append(lse{'.double()' if self.wide else ''})",
            "output, lse = attn_ext.merge_partials(outputs, lses)",
            "print(output, lse.to(torch.promote_types(output.dtype, torch.float32)))",
            f"print(reference.sdpa_with_lse(query, key, value{all_of_it}{text}))",
        ]
        if wanted:
            pairs = f"[{through}], [{', '.join(wanted)}], [{given}]"
            lines += [
                f"lse = lse.to({'torch.float64' if whole.dtype == 'float64' else 'torch.float32'})",
                f"print(torch.autograd.grad({pairs}, allow_unused=True))",
            ]
        return "\n".join(lines)

    def smaller(self) -> Iterator["MergedCase"]:
        """Simpler cases, the greatest steps first."""
        if self.wide:
            yield replace(self, wide=False)
        for i, size in enumerate(self.parts):
            yield replace(self, parts=self.parts[:i] + self.parts[i + 1 :])
            for to in dict.fromkeys((1, size // 2, size - 1)):
                if 0 <= to < size:
                    yield replace(self, parts=(*self.parts[:i], to, *self.parts[i + 1 :]))
        for whole in smaller_cases(self.whole):
            yield replace(self, whole=whole)


def in_parts(case: MergedCase, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``sdpa_with_lse``, which is ``function``, by parts of the keys."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        query_offset: int = 0,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        lses: list[Tensor] = []
        for begin, end in case.bounds:
            mask = attn_mask
            if mask is not None and case.cuts_mask:
                mask = mask[..., begin:end]
            more = {
                "attn_mask": mask,
                "sinks": None if outputs else sinks,
                "query_offset": query_offset - begin,
            }
            part = key[..., begin:end, :], value[..., begin:end, :]
            output, lse = function(query, *part, **more, **options)
            outputs.append(output)
            lses.append(lse)
        output, lse = attn_ext.merge_partials(outputs, [t.double() for t in lses] if case.wide else lses)
        return output, lse.to(lses[0].dtype)

    return call


def run_merged(case: MergedCase, tensors: dict[str, Tensor], subject: str) -> Results:
    """Outputs and gradients by name."""
    return run(case.whole, tensors, subject, around=lambda function: in_parts(case, function))


def check_merged(case: MergedCase, subject: str) -> Mismatch | None:
    """The first mismatch of a case, None where all is well."""
    return check_as(case.whole, case, subject, run_merged)


def draw_merged_case(seed: int, number: int) -> MergedCase:
    """Case ``number`` of a run with ``seed``."""
    draw = random.Random(f"merged {seed}/{number}")
    while True:
        whole = draw_case(draw.randrange(10**9), number)
        if MergedCase(whole).valid:
            break
    count = draw.choice((0, 1, 1, 2, 3, 4))
    parts = tuple(draw.choice((0, 1, whole.lk // 2, draw.randint(0, whole.lk))) for _ in range(count))
    return MergedCase(whole, parts, draw.random() < 0.2)


__all__ = ["MergedCase", "check_merged", "draw_merged_case", "run_merged"]

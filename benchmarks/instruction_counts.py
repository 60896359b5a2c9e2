"""Instructions of the kernels' hot loops, from the assembly of every instruction set, as Markdown.

Nothing is run, so that sets can be counted that the machine lacks: whatever a compiler is there for,
``$CXX`` (c++) for this machine's processors and ``$ARM_CXX`` (aarch64-linux-gnu-g++) for Arm's. A figure
is the instructions of a loop, loads, addresses and branch included, over the multiply-adds of vectors
among them; "stack" counts those that spill registers or fetch them back.

Usage: python benchmarks/instruction_counts.py
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
X86 = "x86_64"
ARM = "aarch64"

# Each function holds one loop that matters; of loops in it, that with the most multiply-adds is counted.
SOURCE = """
#include "forward/forward.h"
namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {
template <typename Product>
using Args = TileArgs<Product>;
#define LOOP extern "C" __attribute__((flatten, visibility("default")))
LOOP void tile_float32(const Args<PlainProduct<float>>& args) {
  tile_product<PlainProduct<float>, kRegisterTileRows, kTileVectors, false, false>(args);
}
LOOP void tile_float64(const Args<PlainProduct<double>>& args) {
  tile_product<PlainProduct<double>, kRegisterTileRows, kTileVectors, false, false>(args);
}
#if defined(ATTN_EXT_HAS_PAIRS)
LOOP void tile_bfloat16(const Args<BFloat16Product>& args) {
  tile_product<BFloat16Product, kRegisterTileRows, kTileVectors, false, false>(args);
}
#endif
LOOP void softmax_float32(float* scores, int64_t end, float scale, float top, float* sum) {
  store(sum, exp_span(scores, 0, end, scale, top, Vec<float>{}));
}
}
"""
LOOPS = {
    "tile_float32": "tile, float32",
    "tile_float64": "tile, float64",
    "tile_bfloat16": "tile, pairs of bfloat16",
    "softmax_float32": "softmax's weights, float32",
}
MULTIPLY_ADD = re.compile(r"fmla|bfdot|vfmadd\w+|vdpbf16ps|mulp[sd]")  # without fused ones, the products
BRANCH = re.compile(r"b\.\w+|cbnz|cbz|tbn?z|j\w+")
STACK = re.compile(r"\bsp\b|%rsp")


class Loop(NamedTuple):
    """A loop's instructions, counted."""

    multiply_adds: int
    instructions: int
    stack: int


def flags_of_sets(family: str) -> dict[str, list[str]]:
    """The compiler's flags of each set, as cmake/capabilities.cmake has them."""
    script = 'include("{}")\nforeach(set baseline {})\nmessage("${{set}}=${{${{set}}}}")\nendforeach()'
    names = "avx2 avx512 avx512_bf16" if family == X86 else "neon neon_bf16"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flags.cmake"
        path.write_text(
            f"set(CMAKE_SYSTEM_PROCESSOR {family})\n"
            + script.format(ROOT / "cmake" / "capabilities.cmake", names)
        )
        done = subprocess.run(["cmake", "-P", path], capture_output=True, text=True, check=True)
    sets = dict(line.split("=", 1) for line in done.stderr.splitlines())
    return {name: value.split(";") for name, value in sets.items()}


def disassemble(compiler: str, objdump: str, capability: str, flags: list[str]) -> str:
    """The assembly of SOURCE."""
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "loops.cpp", Path(folder) / "loops.o"
        source.write_text(SOURCE)
        options = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w", *flags]
        include = f"-I{ROOT / 'csrc' / 'cpu' / 'kernels'}"
        name = f"-DATTN_EXT_CPU_CAPABILITY={capability}"
        subprocess.run([compiler, *options, name, include, "-c", source, "-o", compiled], check=True)
        command = [objdump, "--disassemble", "--no-show-raw-insn", compiled]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(assembly: str) -> dict[str, list[tuple[int, str, str]]]:
    """Address, name and operands of each instruction of each function."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    body: list[tuple[int, str, str]] = []
    for line in assembly.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.*)>:", line):
            body = found[start[1]] = []
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            body.append((int(instruction[1], 16), instruction[2], instruction[3]))
    return found


def loops(body: list[tuple[int, str, str]]) -> list[Loop]:
    """The innermost loops of a function: those that jump back and hold no other."""
    places = {address: i for i, (address, _, _) in enumerate(body)}
    ranges = []
    for i, (_, name, operands) in enumerate(body):
        target = re.search(r"([0-9a-f]+) <", operands)
        if BRANCH.fullmatch(name) and target and places.get(int(target[1], 16), i + 1) <= i:
            ranges.append((places[int(target[1], 16)], i))
    inner = [(a, b) for a, b in ranges if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in ranges)]
    return [
        Loop(
            sum(MULTIPLY_ADD.fullmatch(name) is not None for _, name, _ in body[a : b + 1]),
            b + 1 - a,
            sum(STACK.search(operands) is not None for _, _, operands in body[a : b + 1]),
        )
        for a, b in inner
    ]


def describe(body: list[tuple[int, str, str]] | None) -> str:
    """The loop with the most multiply-adds: instructions for one of them, and of what numbers that is."""
    if body is None:
        return "-"
    loop = max(loops(body), key=lambda loop: (loop.multiply_adds, -loop.instructions))
    stack = f", stack {loop.stack}" if loop.stack else ""
    ratio = loop.instructions / loop.multiply_adds
    return f"{ratio:.2f} ({loop.instructions} / {loop.multiply_adds}{stack})"


def main() -> int:
    """Prints the table."""
    families = []
    if platform.machine() == X86:
        families.append((X86, os.environ.get("CXX", "c++"), "objdump"))
    families.append((ARM, os.environ.get("ARM_CXX", "aarch64-linux-gnu-g++"), "aarch64-linux-gnu-objdump"))
    print(f"| set | {' | '.join(LOOPS.values())} |")
    print(f"| --- |{' --: |' * len(LOOPS)}")
    for family, compiler, objdump in families:
        if not shutil.which(compiler) or not shutil.which(objdump):
            print(f"no {compiler} or no {objdump}: {family} is left out", file=sys.stderr)
            continue
        for capability, flags in flags_of_sets(family).items():
            found = functions(disassemble(compiler, objdump, capability, flags))
            label = f"{capability} (Arm)" if family == ARM and capability == "baseline" else capability
            print(f"| {label} | {' | '.join(describe(found.get(name)) for name in LOOPS)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fails on a kernel object that holds what does not belong to its instruction set.

The linker keeps one copy of an inline function. Were it the copy compiled for AVX-512, an older processor
would crash in code that has nothing to do with kernels. So a kernel object may only have weak symbols of its
own instruction set's namespace. That goes for the baseline as well, whose copies other sets would take.

Nor may an object have instructions of a better set than its own, as it has where the user's flags allow them
and nobody takes that back: on an older processor it would be chosen and crash.

Usage: python check_kernel_symbols.py CMAKE_BUILD_FOLDER

The folder is that of the library or of the kernel tests. The variables NM and OBJDUMP name the tools for
objects of another processor.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# In a line of disassembly. AVX begins its names with v; AVX-512 has masks and registers of its own.
AVX512 = r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b"
# On Arm the scalable vectors have registers of their own, and armv8.2-a with bfloat16 has these names.
SVE = r"\bz\d+\.[bhsd]\b"
ARM_BF16 = r"\t(bf(dot|mmla|mlal|cvt)\w*|sqrdml[as]h|crc32\w*|cas[abhlp]*|swp[abhl]*)\t"
FOREIGN = {
    "baseline": rf"^\s*[0-9a-f]+:\s+v|%ymm|{AVX512}|{ARM_BF16}|{SVE}",
    "avx2": AVX512,
    "neon": rf"{ARM_BF16}|{SVE}",
    "neon_bf16": SVE,
}


def leaks(kernel_object: Path, capability: str) -> list[str]:
    """The weak symbols outside the namespace of the set, demangled."""
    listing = subprocess.run(
        [os.environ.get("NM", "nm"), "--demangle", "--defined-only", kernel_object],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    weak = re.findall(r"^[0-9a-f]* [WVu] (.*)$", listing, re.MULTILINE)
    return [symbol for symbol in weak if f"{capability}::" not in symbol]


def foreign_instructions(kernel_object: Path, capability: str) -> list[str]:
    """Those of better sets."""
    if capability not in FOREIGN:
        return []
    listing = subprocess.run(
        [os.environ.get("OBJDUMP", "objdump"), "--disassemble", "--no-show-raw-insn", kernel_object],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line.strip() for line in listing.splitlines() if re.search(FOREIGN[capability], line)]


def main() -> int:
    """Looks at every kernel object of the build."""
    objects = sorted(
        path
        for target in ("attn_ext", "kernels")
        for path in Path(sys.argv[1]).glob(f"**/{target}_kernels_*.dir/**/*.o")
    )
    if not objects:
        print(f"no kernel objects under {sys.argv[1]}", file=sys.stderr)
        return 1
    failed = False
    for kernel_object in objects:
        (capability,) = re.findall(r"/(?:attn_ext|kernels)_kernels_(\w+)\.dir", str(kernel_object))
        for symbol in leaks(kernel_object, capability):
            failed = True
            print(f"{kernel_object} leaks the weak symbol {symbol}", file=sys.stderr)
        foreign = foreign_instructions(kernel_object, capability)
        if foreign:
            failed = True
            print(
                f"{kernel_object} has {len(foreign)} instructions of a better set, such as {foreign[0]}",
                file=sys.stderr,
            )
    print(f"{len(objects)} kernel objects looked at")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fails on a weak symbol that a kernel object compiled for more than the baseline would share with the rest.

The linker keeps one copy of an inline function. Were it the copy compiled for AVX-512, an older processor
would crash in code that has nothing to do with kernels. So a kernel object may only have weak symbols of its
own instruction set's namespace.

Usage: python check_kernel_symbols.py CMAKE_BUILD_FOLDER
"""

import re
import subprocess
import sys
from pathlib import Path


def leaks(kernel_object: Path, capability: str) -> list[str]:
    """The weak symbols outside the namespace of the set, demangled."""
    listing = subprocess.run(
        ["nm", "--demangle", "--defined-only", kernel_object], capture_output=True, text=True, check=True
    ).stdout
    weak = re.findall(r"^[0-9a-f]* [WVu] (.*)$", listing, re.MULTILINE)
    return [symbol for symbol in weak if f"{capability}::" not in symbol]


def main() -> int:
    """Looks at every kernel object of the build."""
    objects = sorted(Path(sys.argv[1]).glob("**/attn_ext_kernels_*.dir/**/*.o"))
    if not objects:
        print(f"no kernel objects under {sys.argv[1]}", file=sys.stderr)
        return 1
    failed = False
    for kernel_object in objects:
        (capability,) = re.findall(r"attn_ext_kernels_(\w+)\.dir", str(kernel_object))
        if capability == "baseline":
            continue
        for symbol in leaks(kernel_object, capability):
            failed = True
            print(f"{kernel_object} leaks the weak symbol {symbol}", file=sys.stderr)
    print(f"{len(objects)} kernel objects looked at")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

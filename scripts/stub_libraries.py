"""Makes stand-ins for shared libraries that others need and that are not there, such as CUDA's for torch's.

    python scripts/stub_libraries.py LIBRARIES SYSTEM OUT

What the libraries in the folder LIBRARIES need, and neither they nor the folder SYSTEM have, is made in the
folder OUT by the cross compiler that CXX names. A stand-in has the name of the library and the symbols that
are asked of it, in their versions: the dynamic linker is content. A function does nothing and returns 100,
which is how CUDA says that there is no device.
"""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

CXX = os.environ.get("CXX", "aarch64-linux-gnu-g++")


def tool(name: str, *arguments: str | Path) -> str:
    """What a program beside the compiler says of a file; nothing of one that is no library."""
    return subprocess.run(
        [CXX.replace("g++", name), *arguments], capture_output=True, text=True, check=False
    ).stdout


def libraries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if re.search(r"\.so(\.\d+)*$|/python3\.\d+$", str(path)))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """What a library has, without versions, and what it asks others for, with them."""
    here, elsewhere = set(), set()
    for line in tool("nm", "-D", library).splitlines():
        kind, symbol = line.split()[-2:]
        if kind == "U":
            elsewhere.add(symbol)
        elif kind not in "wv":  # weak: may be nowhere
            here.add(symbol.partition("@")[0])
    return here, elsewhere


def versions(library: Path) -> dict[str, str]:
    """The library that each version of a symbol is asked of."""
    found, file = {}, ""
    for line in tool("readelf", "-V", library).splitlines():
        if match := re.search(r"Version: \d+  File: (\S+)", line):
            file = match[1]
        elif match := re.search(r"  Name: (\S+)  Flags:", line):
            found[match[1]] = file
    return found


def main(folder: Path, system: Path, out: Path) -> None:
    there = libraries(system)
    asking = libraries(folder)
    names = {path.name for path in there + asking}
    defined = set().union(*(symbols(library)[0] for library in there + asking))
    stubs: dict[str, dict[str, set[str]]] = {}
    for library in asking:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", library))
        missing = [name for name in needed if name not in names]
        for name in missing:
            stubs.setdefault(name, defaultdict(set))
        of_version = versions(library)
        for symbol, _, version in (word.replace("@@", "@").partition("@") for word in symbols(library)[1]):
            if symbol not in defined and missing:
                name = of_version[version] if version else missing[0]
                stubs[name][version].add(symbol)

    out.mkdir(parents=True, exist_ok=True)
    for name, wanted in stubs.items():
        make_stub(out / name, wanted)
        print(f"{name}: {sum(map(len, wanted.values()))} symbols")


def make_stub(library: Path, wanted: dict[str, set[str]]) -> None:
    """A library with the symbols wanted in each version; "" is none."""
    with TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        every = sorted(set().union(*wanted.values()))
        source.write_text("".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in every))
        command = [CXX, "-x", "c", "-w", "-shared", "-fPIC", "-nostdlib", source, "-o", library]
        command.append(f"-Wl,-soname,{library.name}")
        lines = [f"{version} {{ {'; '.join(sorted(wanted[version]))}; }};\n" for version in wanted if version]
        if lines:
            script.write_text("".join(lines))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

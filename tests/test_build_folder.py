"""Building again compiles what changed, and nothing else; jobs follow the memory that there is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

# In place of the real one: two files that compile in a moment.
CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
include(cmake/compile_commands.cmake)
include(cmake/attn_extTorch.cmake)
set(ATTN_EXT_TORCH_LINK "${CMAKE_CURRENT_BINARY_DIR}/torch")
attn_ext_find_torch()
add_library(small SHARED one.cpp two.cpp)
target_include_directories(small PRIVATE "${ATTN_EXT_TORCH_DIR}/include")
set_target_properties(small PROPERTIES INSTALL_RPATH "${ATTN_EXT_TORCH_RPATH}")
install(TARGETS small LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
"""


@pytest.fixture
def modules(monkeypatch):
    """The modules of the build backend, imported as pip does."""
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import attn_ext_build
    import build_folder
    import compile_jobs

    return attn_ext_build, build_folder, compile_jobs


class SmallProject:
    """The build of the project around two files, and a log of what is compiled."""

    def __init__(self, folder: Path):
        self.folder, self.scratch = folder / "small", folder
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "build_backend", "cmake"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            (self.folder / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, self.folder / name)
        (self.folder / "attn_ext").mkdir()
        (self.folder / "attn_ext" / "__init__.py").touch()
        (self.folder / "CMakeLists.txt").write_text(CMAKE_LISTS)
        self.write("one", 1)
        self.write("two", 2)
        self.torch = self.make_torch("torch")
        self.log = folder / "compiled"
        self.before: list[str] = []  # a program that starts the build
        self.launcher = folder / "launcher"
        self.launcher.write_text(f'#!/bin/sh\necho "$@" >>{self.log}\nexec "$@"\n')
        self.launcher.chmod(0o755)

    def write(self, name: str, number: int) -> None:
        (self.folder / f"{name}.cpp").write_text(
            f"#include <torch/small.h>\nint {name}() {{ return {number}; }}\n"
        )

    def make_torch(self, name: str, version: str = "2.13.0") -> Path:
        torch = self.scratch / name / "torch"
        (torch / "include" / "torch").mkdir(parents=True)
        (torch / "include" / "torch" / "small.h").touch()
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (torch / "include" / "torch" / "headeronly").mkdir()
        (torch / "include" / "torch" / "headeronly" / "version.h").write_text(
            "".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers)
        )
        (torch / "version.py").write_text(f"__version__ = '{version}'\n")
        return torch

    def build(self, hook: str, **environment: str) -> list[str]:
        """Builds as pip does and gives the stems of the files that were compiled."""
        self.log.write_text("")
        (self.scratch / "wheels").mkdir(exist_ok=True)
        calling = f"import attn_ext_build; attn_ext_build.{hook}({str(self.scratch / 'wheels')!r})"
        result = subprocess.run(
            [*self.before, sys.executable, "-c", calling],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder / "build_backend"),
                "ATTN_EXT_TORCH_DIR": str(self.torch),
                "CMAKE_CXX_COMPILER_LAUNCHER": str(self.launcher),
                "CMAKE_ARGS": "",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        lines = [line for line in self.log.read_text().splitlines() if "CMakeFiles/small.dir" in line]
        return sorted(Path(line.split()[-1]).stem for line in lines)


@pytest.fixture
def small(tmp_path):
    pytest.importorskip("setuptools")
    return SmallProject(tmp_path)


def test_only_what_changed_is_compiled_again(small):
    assert small.build("build_editable") == ["one", "two"]
    assert small.build("build_editable") == []
    small.write("two", 22)
    assert small.build("build_editable") == ["two"]
    assert small.build("build_wheel") == []
    assert small.build("build_editable") == []
    small.torch = small.make_torch("the same elsewhere")
    os.utime(small.torch / "include" / "torch" / "small.h", (0, 0))
    assert small.build("build_editable") == []


def test_another_torch_build_type_or_flag_gets_a_folder_of_its_own_and_the_first_keeps_its(small):
    one_and_two = small.build("build_editable")
    first = small.torch
    small.torch = small.make_torch("newer", "2.14.0")
    assert small.build("build_editable") == one_and_two
    assert small.build("build_editable", CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Debug") == one_and_two
    assert small.build("build_editable", CXXFLAGS="-O1") == one_and_two
    small.torch = first
    assert small.build("build_editable") == []


def test_editors_are_sent_to_a_folder_that_stays(small):
    small.build("build_editable")
    entries = json.loads((small.folder / "compile_commands.json").read_text())
    assert len(entries) == 2
    for entry in entries:
        folder = Path(entry["directory"])
        assert folder.is_dir()
        assert folder.parent == small.folder / "build"


READ_ONLY = """
mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"
"""


def test_a_read_only_source_tree_builds_in_the_users_cache(small, tmp_path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    small.before = ["unshare", "-m", "sh", "-ec", READ_ONLY, str(small.folder)]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = sorted(small.folder.rglob("*"))
    assert small.build("build_wheel", **cache) == ["one", "two"]
    assert small.build("build_wheel", **cache) == []
    assert list((small.scratch / "wheels").glob("attn_ext-*.whl"))
    assert sorted(small.folder.rglob("*")) == before


# Jobs


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"),
    [
        (8, 64, (8, 8)),  # cores are what there is least of
        (8, 5.25, (5, 5)),  # five files with torch's headers, and no room for a kernel beside them
        (8, 1.85, (3, 1)),  # one such file and two kernels
        (8, 0.5, (1, 1)),
        (1, 64, (1, 1)),
    ],
)
def test_jobs_fit_into_cores_and_memory(modules, cores, gigabytes, expected):
    assert modules[2].jobs(cores, gigabytes) == expected


def limit(root: Path, path: str, value: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(value + "\n")


def test_the_tightest_limit_around_a_group_of_cgroup_v2_rules(modules, tmp_path):
    limit(tmp_path, "proc/self/cgroup", "0::/outer/inner")
    limit(tmp_path, "sys/fs/cgroup/outer/inner/memory.max", "max")
    limit(tmp_path, "sys/fs/cgroup/outer/memory.max", str(2**29))
    limit(tmp_path, "sys/fs/cgroup/memory.max", str(2**30))
    assert modules[2].memory(str(tmp_path)) == 0.5


def test_the_limit_of_cgroup_v1_rules_where_a_container_sees_its_group_as_the_root(modules, tmp_path):
    limit(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/b\n0::/")
    limit(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**28))
    assert modules[2].memory(str(tmp_path)) == 0.25


def test_without_a_limit_the_machines_memory_rules(modules, tmp_path):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert modules[2].memory(str(tmp_path)) == machine
    limit(tmp_path, "proc/self/cgroup", "4:memory:/")
    limit(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert modules[2].memory(str(tmp_path)) == machine

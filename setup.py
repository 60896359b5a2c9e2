"""Drives CMake. The C++ build is described in CMakeLists.txt, everything else in pyproject.toml.

Environment variables that a build heeds:
    ATTN_EXT_TORCH_DIR            the torch folder to build against, instead of the one found
    ATTN_EXT_WERROR=ON            every C++ warning is an error
    CXX                           the compiler
    CMAKE_ARGS                    more arguments for CMake, such as -DCMAKE_BUILD_TYPE=Debug
    CMAKE_BUILD_PARALLEL_LEVEL    how many compilers run at once; by default what cores and memory allow
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import attn_ext_build as backend  # noqa: E402
import build_folder  # noqa: E402
import compile_jobs  # noqa: E402


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake, into the package's own folder."""

    def run(self) -> None:
        backend.check_build_requirements()
        torch = backend.find_torch()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_place else Path(self.build_lib).resolve()) / "attn_ext"
        build = Path(build_folder.builds_of(str(ROOT)), build_folder.key(torch))
        with build_folder.locked(str(build)):
            self.build(build, torch, in_place)
            for generated in ("lib", "include"):
                shutil.rmtree(package / generated, ignore_errors=True)
            strip = [] if in_place else ["--strip"]
            self.check_run([backend.find_cmake(), "--install", build, "--prefix", package], strip)

    def build(self, build: Path, torch: backend.Torch, in_place: bool) -> None:
        """Compiles what changed since the last build in this folder."""
        cmake = backend.find_cmake()
        limits = compile_jobs.jobs(len(os.sched_getaffinity(0)), compile_jobs.memory())
        jobs_are_given = "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ
        beside_torch = "$ORIGIN/../../torch/lib"
        # File by file where somebody may change them, and an editor asks for the commands; for a wheel some
        # as one, unless the objects are there already.
        unity = ["-DATTN_EXT_UNITY_BUILD=OFF"] if in_place else []
        if not in_place and not (build / "CMakeCache.txt").exists():
            unity = ["-DATTN_EXT_UNITY_BUILD=ON"]
        self.check_run(
            [cmake, "-S", ROOT, "-B", build, "-G", "Ninja"],
            [f"-DCMAKE_MAKE_PROGRAM={backend.find_tool('ninja')}"],
            ["-DATTN_EXT_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"],
            [f"-DATTN_EXT_TORCH_DIR={torch.directory}"],
            [f"-DATTN_EXT_TORCH_RPATH={Path(torch.directory, 'lib') if in_place else beside_torch}"],
            [f"-DATTN_EXT_TORCH_JOBS={'' if jobs_are_given else limits.torch}"],
            [f"-DATTN_EXT_WERROR={os.environ.get('ATTN_EXT_WERROR', 'OFF')}"],
            unity,
            ["-DCMAKE_INSTALL_LIBDIR=lib"],
            shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        parallel = [] if jobs_are_given else ["--parallel", limits.all]
        self.check_run([cmake, "--build", build], parallel)

    def check_run(self, *parts: list) -> None:
        """Runs a command; its own output says what went wrong."""
        command = [str(word) for part in parts for word in part]
        if subprocess.run(command, check=False).returncode != 0:
            backend.fail("the build stopped at the message above, in: " + shlex.join(command))

    def get_output_mapping(self) -> dict:
        return {}

    def get_outputs(self) -> list:
        return []


def dependencies() -> list:
    """The minor version of torch that is built against: its C++ interface changes with each."""
    torch = backend.find_torch()
    if torch is None:  # only a source distribution gets this far
        return [f"torch>={backend.dotted(backend.MINIMUM_TORCH)}"]
    return [f"torch=={backend.dotted(backend.numbers(torch.version))}.*"]


def long_description() -> str:
    """README.md as an index page can show it: without the pictures and links that name files of a clone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?![a-z]+://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?![a-z]+://)[^)]*\)", r"\1", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("attn_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=dependencies(),
)

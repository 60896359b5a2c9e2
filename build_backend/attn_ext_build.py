"""The build backend: setuptools, told about the torch of the environment that is being installed into.

pip builds in an isolated environment, where the user's torch cannot be imported. It runs the user's own
interpreter though, so that the folders of the user's environment are still known; uv does not, and is asked
(uv_target.py). The extension is built against the torch found there; only where there is none does the build
ask for one.

Nothing here is imported from outside the standard library until a hook runs: a Python that is too old shall
reach the sentence that says so.
"""

import contextlib
import glob
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections import namedtuple

import build_folder
import uv_target

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 11)
MINIMUM_CMAKE = (3, 22)
MINIMUM_SETUPTOOLS = (77, 0)
SETUPTOOLS = "setuptools>=77,<82"  # torch 2.11 wants none from 82 on in the environment that it is in
TORCH_WHERE_THERE_IS_NONE = "torch==2.13.0"

Torch = namedtuple("Torch", "directory version")


def fail(sentence):
    """Ends the build with one sentence instead of a traceback."""
    raise SystemExit("attn_ext: " + sentence)


def numbers(version):
    """The leading numbers of a version: (2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def dotted(version):
    return ".".join(map(str, version))


def install(*requirements):
    """The command that installs what is lacking, also into an environment that is not activated."""
    uv = uv_target.is_parent()
    return shlex.join(
        [*(uv_target.install_command() if uv else [sys.executable, "-m", "pip", "install"]), *requirements]
    )


def site_folders():
    """The folders in which the user's environment keeps its packages, best first."""
    folders = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    in_virtual_environment = sys.prefix != sys.base_prefix
    if not in_virtual_environment:
        folders += [site.getusersitepackages(), *site.getsitepackages()]
    else:
        try:
            with open(os.path.join(sys.prefix, "pyvenv.cfg")) as config:
                sees_system = re.search(r"(?im)^include-system-site-packages\s*=\s*true", config.read())
        except OSError:
            sees_system = None
        if sees_system:
            folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]
    return folders


def find_torch():
    """The torch to build against, or None: ATTN_EXT_TORCH_DIR, else an importable one, else the user's."""
    if os.environ.get("ATTN_EXT_TORCH_DIR"):
        candidates = [os.environ["ATTN_EXT_TORCH_DIR"]]
    else:
        spec = importlib.util.find_spec("torch")
        candidates = list(spec.submodule_search_locations or []) if spec else []
        candidates += [os.path.join(folder, "torch") for folder in site_folders()]
        if uv_target.is_parent() and isinstance(uv_target.packages(), str):
            candidates.append(os.path.join(uv_target.packages(), "torch"))
    for directory in candidates:
        try:
            with open(os.path.join(directory, "version.py")) as file:
                version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", file.read())
        except OSError:
            continue
        if version:
            return Torch(directory, version.group(1))
    return None


def tool_folders():
    """PATH, and the scripts of the running interpreter, which need not be on it."""
    return [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]


def find_tool(name):
    """A program, or None."""
    return shutil.which(name, path=os.pathsep.join(tool_folders()))


def cmakes():
    """Every CMake that runs, and its version: where that of PATH is too old, one beside Python may not be."""
    for path in tool_folders():
        cmake = shutil.which("cmake", path=path)
        if cmake:
            answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"\d+\.[\d.]+", answer)
            if version:
                yield cmake, version.group()


def find_cmake():
    """A CMake that is new enough, or None."""
    return next((cmake for cmake, version in cmakes() if numbers(version) >= MINIMUM_CMAKE), None)


def check_environment():
    """Everything that a build needs and cannot bring along itself."""
    if sys.version_info < MINIMUM_PYTHON:
        fail(f"Python {dotted(MINIMUM_PYTHON)} or later is needed; this is {sys.version.split()[0]}.")
    if not sys.platform.startswith("linux"):
        fail(f"only Linux is supported; this is {sys.platform}.")
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        fail(
            f"no C++ compiler was found (looked for {', '.join(compilers)}): install GCC 11 or later, "
            "or Clang 14 or later, or name one in CXX."
        )
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        fail(
            f"Python.h is not in {headers}: install Python's development headers "
            "(on Debian and Ubuntu the package python3-dev)."
        )
    torch = find_torch()
    if torch and numbers(torch.version) < MINIMUM_TORCH:
        fail(
            f"torch {dotted(MINIMUM_TORCH)} or later is needed; {torch.directory} is torch {torch.version}. "
            f"Upgrade it: {install(TORCH_WHERE_THERE_IS_NONE)}"
        )


def check_build_requirements():
    """What `get_requires_for_build_wheel` asks for, checked: without build isolation nobody installs it."""
    check_environment()
    missing = {}  # what to install: how the sentence names it
    if find_cmake() is None:
        too_old = [f"{version} found in {cmake}" for cmake, version in cmakes()]
        needed = f" (too old: {', '.join(too_old)}, {dotted(MINIMUM_CMAKE)} needed)" if too_old else ""
        missing["cmake"] = "cmake" + needed
    if find_tool("ninja") is None:
        missing["ninja"] = "ninja"
    if find_torch() is None:
        missing[TORCH_WHERE_THERE_IS_NONE] = TORCH_WHERE_THERE_IS_NONE
    if missing:
        fail(f"the build needs {' and '.join(missing.values())}: {install(*missing)}")


def _build_requires(_config_settings=None):
    check_environment()
    requires = [SETUPTOOLS]
    if find_cmake() is None:
        requires.append("cmake>=" + dotted(MINIMUM_CMAKE))
    if find_tool("ninja") is None:
        requires.append("ninja")
    if find_torch() is None:
        if uv_target.is_parent() and uv_target.packages() is uv_target.UNKNOWN:
            fail(
                "uv builds where your torch cannot be seen, and did not say where it is: install "
                f"torch '{SETUPTOOLS}' cmake ninja into your environment and run uv with "
                "--no-build-isolation, or name torch's folder in ATTN_EXT_TORCH_DIR."
            )
        requires.append(TORCH_WHERE_THERE_IS_NONE)
    return requires


@contextlib.contextmanager
def _setuptools():
    """The backend that does the work; where the source tree is read-only, told to write elsewhere."""
    try:
        import setuptools
        from setuptools import build_meta
    except ImportError:
        fail(f"the build needs setuptools: {install(SETUPTOOLS)}")
    if numbers(setuptools.__version__) < MINIMUM_SETUPTOOLS:
        fail(
            f"setuptools is too old: {setuptools.__version__} found, {dotted(MINIMUM_SETUPTOOLS)} needed: "
            + install(SETUPTOOLS)
        )
    if build_folder.writable(os.getcwd()):
        yield build_meta
        return
    with tempfile.TemporaryDirectory() as scratch:
        config = os.path.join(scratch, "setup.cfg")
        with open(config, "w") as file:
            file.write(f"[egg_info]\negg_base = {scratch}\n[build]\nbuild_base = {scratch}/build\n")
        os.environ["DIST_EXTRA_CONFIG"] = config
        yield build_meta


def _check_that_libraries_can_be_put_into_the_sources():
    if not build_folder.writable(os.getcwd()):
        fail(
            f"an editable install puts its libraries into the source tree, and {os.getcwd()} is read-only: "
            "install without -e."
        )


# The hooks of PEP 517 and PEP 660.

get_requires_for_build_wheel = _build_requires
get_requires_for_build_editable = _build_requires


def get_requires_for_build_sdist(_config_settings=None):
    return [SETUPTOOLS]


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    check_build_requirements()
    with _setuptools() as setuptools:
        return setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    check_build_requirements()
    _check_that_libraries_can_be_put_into_the_sources()
    with _setuptools() as setuptools:
        return setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    check_build_requirements()
    with _setuptools() as setuptools:
        if build_folder.writable(os.getcwd()):
            for left_over in glob.glob(
                os.path.join("build", "lib*")
            ):  # modules that the sources no longer have
                shutil.rmtree(left_over)
        return setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    check_build_requirements()
    _check_that_libraries_can_be_put_into_the_sources()
    with _setuptools() as setuptools:
        return setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    with _setuptools() as setuptools:
        return setuptools.build_sdist(sdist_directory, config_settings)

"""Where CMake builds: a folder that stays, so that a build only compiles what changed.

setuptools would build in a folder of its own, for an editable install in a temporary one.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

# What CMake reads on its first run in a folder, and what each compile command is made of.
COMPILER_VARIABLES = ("CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", "ATTN_EXT_WERROR")


def writable(folder):
    """Whether files can be made there: a source tree may be a read-only mount."""
    return os.access(folder, os.W_OK)


def builds_of(root):
    """Where a source tree is built: in its `build`, or in the user's cache if the tree is read-only."""
    if writable(root):
        return os.path.join(root, "build")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    return os.path.join(cache, "attn_ext", hashlib.sha256(root.encode()).hexdigest()[:12])


def compiler():
    """The command of the C++ compiler that CMake takes: that of CXX, or the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return [next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")]


def key(torch):
    """A name for each Python, torch and compiler with its flags, so that objects of two never mix.

    Where torch lies is no part of it: an isolated build that brings one has it elsewhere each time.
    """
    command = compiler()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    with open(os.path.join(torch.directory, "version.py")) as file:  # which tells CUDA builds from others
        rest = [sysconfig.get_path("include"), file.read(), shutil.which(command[0]), *command[1:], version]
    rest += [os.environ.get(name, "") for name in COMPILER_VARIABLES]
    digest = hashlib.sha256("\0".join(map(str, rest)).encode()).hexdigest()[:8]
    torch_name = re.sub(r"[^\w.+-]", "_", torch.version)
    return f"{sys.implementation.cache_tag}-torch-{torch_name}-{digest}"


@contextlib.contextmanager
def locked(folder):
    """Makes a build folder and keeps other builds out of it: two scripts may be started at once."""
    os.makedirs(folder, exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

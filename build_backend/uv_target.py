"""The torch of the environment that uv installs into.

uv builds in an environment of its own and, unlike pip, runs that environment's interpreter: VIRTUAL_ENV,
sys.prefix and all else here name the wrong one. But uv is the parent of this process, and `uv pip show`
answers for the environment that a command line, its folder and its variables lead to; so it is asked in the
parent's place.
"""

import functools
import os
import re
import subprocess

# The words of a `uv pip install` that say where to; those that are followed by a value.
SELECTING = {"--python": 1, "-p": 1, "--system": 0, "--target": 1, "-t": 1, "--prefix": 1}

UNKNOWN = object()


def read(process, name):
    with open(f"/proc/{process}/{name}", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def is_parent():
    """Whether uv runs this build. (UV alone says little: everything under `uv run` has it.)"""
    try:
        return os.path.samefile(f"/proc/{os.getppid()}/exe", os.environ["UV"])
    except (KeyError, OSError):
        return False


def selection(command_line):
    """Those words of uv's command line that choose an environment."""
    chosen, words = [], iter(command_line)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in SELECTING:
            chosen.append(word)
            if SELECTING[name] and not equals:
                chosen.append(next(words, ""))
    return chosen


def ask(*words):
    """Runs `uv pip show` as if the parent did."""
    parent = os.getppid()
    return subprocess.run(
        [os.environ["UV"], "pip", "show", *words],
        cwd=f"/proc/{parent}/cwd",
        env=dict(entry.split("=", 1) for entry in read(parent, "environ") if "=" in entry),
        capture_output=True,
        text=True,
        check=False,
    )


@functools.lru_cache(maxsize=1)
def packages():
    """The folder of packages with the user's torch; None where there is none, UNKNOWN where uv can't say.

    A torch that is not there settles nothing for a project (`uv sync`, `uv add`): it may be about to come.
    """
    try:
        command_line = read(os.getppid(), "cmdline")
        answer = ask(*selection(command_line), "torch")
    except OSError:
        return UNKNOWN
    found = re.search(r"(?m)^Location: (.*)$", answer.stdout)
    if found:
        return found.group(1)
    no_project = command_line[1:2] in (["pip"], ["tool"], ["build"])
    return None if no_project and answer.returncode == 1 else UNKNOWN


def install_command():
    """How the user installs something into that environment."""
    return ["uv", "pip", "install", *selection(read(os.getppid(), "cmdline"))]

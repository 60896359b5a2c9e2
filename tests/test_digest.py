"""The tool that compares every bit of two builds: it repeats itself, and tells when something differs."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attn_ext

TOOLS = Path(__file__).parent / "tools"

pytestmark = pytest.mark.skipif(attn_ext.cpu_capability() == "aten", reason="the kernels' bits are hashed")


def write(path: Path, *threads: str) -> Path:
    chosen = ("--only", "threads/1x2/64x200*", "--capabilities", attn_ext.cpu_capability())
    command = [sys.executable, str(TOOLS / "digest.py"), "--out", str(path), *chosen, "--threads", *threads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("digest") / "before.txt", "1", "2")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], int]:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("digest").compare


def test_another_run_on_other_threads_is_equal(before, compare, tmp_path, capsys):
    assert compare(before, write(tmp_path / "after.txt", "2", "1")) == 0
    assert " 0 differ, 0 have no partner" in capsys.readouterr().out


def test_a_changed_hash_is_told_by_case_and_result(before, compare, tmp_path, capsys):
    first, second, *others = before.read_text().splitlines()
    words = second.split()
    name, _, value = words[-1].rpartition("=")
    words[-1] = f"{name}={value}0"
    after = tmp_path / "after.txt"
    after.write_text("\n".join([first, " ".join(words), *others]))
    assert compare(before, after) == 1
    printed = capsys.readouterr().out
    assert f"differs: {' '.join(words[:3])}: {name}\n" in printed
    assert " 1 differ, 0 have no partner" in printed


def test_a_missing_case_is_told(before, compare, tmp_path, capsys):
    after = tmp_path / "after.txt"
    after.write_text("\n".join(before.read_text().splitlines()[1:]))
    assert compare(before, after) == 1
    assert f"only in {before}" in capsys.readouterr().out

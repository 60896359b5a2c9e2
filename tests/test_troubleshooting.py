"""Every message in docs/troubleshooting.md is one that comes: it is provoked here."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext import _version_check

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = re.findall(
    r"^\*\*(`+)(.*?)\1\*\*$",
    (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")

QUERY = torch.randn(2, 8, 5, 16)
Provoke = Callable[[pytest.MonkeyPatch, Path], str]


def said(function: Callable[[], object]) -> str:
    with pytest.raises((Exception, SystemExit)) as error:
        function()
    return str(error.value)


def call(query: torch.Tensor = QUERY, key: torch.Tensor = QUERY, **options) -> Provoke:
    return lambda monkeypatch, folder: said(lambda: attn_ext.sdpa(query, key, key, **options))


def run(*command: object, folder: Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    return result.stdout + result.stderr


def building(provoke: Callable[[pytest.MonkeyPatch, Path], None]) -> Provoke:
    """What the build says where ``provoke`` has taken away what it needs."""

    def message(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
        monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
        import attn_ext_build as backend

        provoke(monkeypatch, folder)
        return said(backend.check_build_requirements)

    return message


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)


def no_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))


def old_torch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "version.py").write_text("__version__ = '2.10.2'\n")
    monkeypatch.setenv("ATTN_EXT_TORCH_DIR", str(folder))


def uv_that_hides_torch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import attn_ext_build as backend

    monkeypatch.setattr(backend, "find_torch", lambda: None)
    monkeypatch.setattr(backend.uv_target, "is_parent", lambda: True)
    monkeypatch.setattr(backend.uv_target, "packages", lambda: backend.uv_target.UNKNOWN)
    return said(backend.get_requires_for_build_wheel)


def other_torch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    from attn_ext import _build_info

    monkeypatch.setattr(_build_info, "torch_version", "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    return said(_version_check.check_build)


def not_built(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setitem(sys.modules, "attn_ext._build_info", None)
    return said(_version_check.check_build)


def unknown_instruction_set(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    importing = (sys.executable, "-c", "import attn_ext")
    return run(*importing, folder=folder, ATTN_EXT_CPU_CAPABILITY="avx99", PYTHONPATH=str(ROOT))


def three_dims(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    attention = attn_ext.MultiHeadAttention(16, 4)
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    return said(lambda: attention(torch.randn(2, 5, 16), mask=mask))


def scripted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.script(attn_ext.SelfAttention(16))
    return "\n".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def loaded_without_the_operator(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(attn_ext.SelfAttention(16)).save(folder / "saved")
    return run(sys.executable, "-c", "import torch; torch.jit.load('saved')", folder=folder)


def exported_and_loaded_without_the_operator(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    program = torch.export.export(attn_ext.SelfAttention(16), (torch.randn(5, 16),))
    torch.export.save(program, folder / "saved.pt2")
    return run(sys.executable, "-c", "import torch; torch.export.load('saved.pt2')", folder=folder)


def compiled_and_run_without_the_operator(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    with torch.no_grad():
        program = torch.export.export(attn_ext.SelfAttention(16), (torch.randn(5, 16),))
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "saved.pt2"))
    loading = "import torch; torch._inductor.aoti_load_package('saved.pt2')(torch.randn(5, 16))"
    return run(sys.executable, "-c", loading, folder=folder)


def no_prefix(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(program NONE)\nfind_package(attn_ext REQUIRED)\n"
    )
    return run("cmake", "-S", folder, "-B", folder / "build", folder=folder)


GROUPS, LONGS = torch.randn(2, 2, 5, 16), torch.ones(5, 5, dtype=torch.long)
PADDING = torch.ones(2, 5, dtype=torch.bool)

# How each message is provoked, in their order.
PROVOKED: list[Provoke] = [
    building(no_compiler),
    building(no_headers),
    building(old_torch),
    uv_that_hides_torch,
    other_torch,
    not_built,
    unknown_instruction_set,
    call(key=GROUPS),
    call(attn_mask=LONGS),
    call(attn_mask=PADDING),
    three_dims,
    call(query=QUERY.bfloat16()),
    scripted,
    loaded_without_the_operator,
    exported_and_loaded_without_the_operator,
    compiled_and_run_without_the_operator,
    no_prefix,
]
SLOW = {compiled_and_run_without_the_operator}


def test_every_message_is_provoked():
    assert len(MESSAGES) == len(PROVOKED)


@pytest.mark.parametrize(
    ("message", "provoke"),
    [
        pytest.param(message, provoke, marks=[pytest.mark.slow] if provoke in SLOW else [])
        for (_, message), provoke in zip(MESSAGES, PROVOKED, strict=False)
    ],
)
def test_message(message, provoke, monkeypatch, tmp_path):
    said = provoke(monkeypatch, tmp_path)
    expected = ".*".join(re.escape(part.strip()) for part in message.split("…"))
    assert re.search(expected, " ".join(said.split()))

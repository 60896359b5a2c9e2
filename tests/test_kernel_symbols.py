"""What the check of the kernels' objects says of code that does not belong to its instruction set."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_kernel_symbols.py"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(
    not SCRIPT.exists() or COMPILER is None or platform.machine() != "x86_64",
    reason="needs the source tree and a compiler for x86-64",
)

ARM = "aarch64-linux-gnu-"
needs_arm_compiler = pytest.mark.skipif(
    shutil.which(ARM + "g++") is None, reason="needs a cross compiler for Arm"
)

SUM = "void add(float* x, const float* y) { for (int i = 0; i < 64; ++i) x[i] += y[i]; }\n"
SHARED = "struct Shared { static inline int count = 0; };\nint& count() { return Shared::count; }\n"


def check(
    folder: Path, capability: str, source: str, *flags: str, arm: bool = False
) -> subprocess.CompletedProcess[str]:
    kernels = folder / f"attn_ext_kernels_{capability}.dir"
    kernels.mkdir()
    (kernels / "kernels.cpp").write_text(source)
    compiler = [ARM + "g++"] if arm else [COMPILER, "-march=x86-64"]
    command = [*compiler, "-std=c++20", "-O3", *flags]
    subprocess.run([*command, "-c", kernels / "kernels.cpp", "-o", kernels / "kernels.o"], check=True)
    environment = os.environ | ({"NM": ARM + "nm", "OBJDUMP": ARM + "objdump"} if arm else {})
    return subprocess.run(
        [sys.executable, SCRIPT, folder], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("capability", "flags"),
    [
        ("baseline", []),
        ("avx2", ["-mavx2"]),
        ("avx512", ["-mavx512f"]),
        ("avx512_bf16", ["-mavx512f", "-mprefer-vector-width=512"]),
        ("amx", ["-mavx512f", "-mprefer-vector-width=512"]),
    ],
)
def test_a_set_s_own_code_passes(tmp_path, capability, flags):
    done = check(tmp_path, capability, f"namespace {capability} {{\n{SHARED}{SUM}}}\n", *flags)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("capability", "flags"),
    [
        ("baseline", ["-mavx"]),
        ("baseline", ["-mavx512f", "-mprefer-vector-width=512"]),
        ("avx2", ["-mavx512f", "-mprefer-vector-width=512"]),
    ],
)
def test_code_of_a_better_set_fails(tmp_path, capability, flags):
    done = check(tmp_path, capability, SUM, *flags)
    assert done.returncode == 1
    assert "of a better set" in done.stderr


@pytest.mark.parametrize("capability", ["baseline", "avx512"])
def test_a_weak_symbol_outside_the_set_s_namespace_fails(tmp_path, capability):
    done = check(tmp_path, capability, SHARED)
    assert done.returncode == 1
    assert "leaks the weak symbol" in done.stderr and "Shared" in done.stderr


DOT = """#include <arm_neon.h>
float32x4_t dot(float32x4_t c, bfloat16x8_t a) { return vbfdotq_f32(c, a, a); }
"""
PLAIN = ["-march=armv8-a"]
BF16 = ["-march=armv8.2-a+bf16"]
SVE = ["-march=armv8.2-a+sve"]


@needs_arm_compiler
@pytest.mark.parametrize(
    ("capability", "source", "flags"),
    [("baseline", SUM, PLAIN), ("neon", SUM, PLAIN), ("neon_bf16", DOT, BF16)],
)
def test_an_arm_set_s_own_code_passes(tmp_path, capability, source, flags):
    done = check(tmp_path, capability, source, *flags, arm=True)
    assert done.returncode == 0, done.stderr


@needs_arm_compiler
@pytest.mark.parametrize(
    ("capability", "source", "flags"),
    [("baseline", DOT, BF16), ("neon", DOT, BF16), ("neon", SUM, SVE), ("neon_bf16", SUM, SVE)],
)
def test_code_of_a_better_arm_set_fails(tmp_path, capability, source, flags):
    done = check(tmp_path, capability, source, *flags, arm=True)
    assert done.returncode == 1
    assert "of a better set" in done.stderr

"""Every instruction set of this machine, and the composition over ATen ops, pass the numerical tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import attn_ext

TESTS = Path(__file__).parent
NUMERICAL = (
    "test_forward.py",
    "test_nonfinite.py",
    "test_backward.py",
    "test_bits.py",
    "test_derivatives.py",
    "test_dropout.py",
    "test_onnx.py",
    "test_packed.py",
    "test_packed_calling.py",
    "test_parts.py",
    "test_partial_calls.py",
    "test_systems.py",
)
OTHERS = [name for name in attn_ext.available_cpu_capabilities() if name != attn_ext.cpu_capability()]

#: Of the tests of bits, which take longest, each set but the one in use runs one part, another one each.
PARTS_OF_BITS = 3

#: Differ from each other in bfloat16 alone.
ALIKE = (("avx512", "avx512_bf16", "amx"), ("neon", "neon_bf16"))


def run(capability: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # One thread, unless a test asks for more: others run on the other cores.
    environment = os.environ | {"ATTN_EXT_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_the_composition_and_the_baseline_are_always_there():
    assert attn_ext.available_cpu_capabilities()[:2] == ["aten", "baseline"]


@pytest.mark.parametrize("capability", attn_ext.available_cpu_capabilities())
def test_a_capability_can_be_forced(capability):
    done = run(capability, "-c", "import attn_ext; print(attn_ext.cpu_capability())")
    assert done.stdout.strip() == capability, done.stderr


def test_a_capability_that_is_not_there_is_an_error_at_import():
    done = run("avx9000", "-c", "import attn_ext")
    assert done.returncode != 0
    assert "avx9000" in done.stderr and "baseline" in done.stderr


@pytest.mark.parametrize("capability", OTHERS)
def test_packed_sequences_and_pages_agree_with_the_reference_on(capability):
    done = run(capability, str(TESTS / "tools" / "packed_check.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"{capability}: 24 packed and 36 paged calls agree"


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS)
def test_numerical_tests_pass_on(capability):
    done = run_numerical(capability, "bfloat16" if has_kernels_of_another_set(capability) else "")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(attn_ext.cpu_capability() != "amx", reason="the set amx has no matrix unit here anyway")
def test_numerical_tests_pass_on_amx_without_a_matrix_unit():
    done = run_numerical("amx", "bfloat16", ATTN_EXT_MATRIX_UNIT="0")
    assert done.returncode == 0, done.stdout[-3000:]


def test_amx_is_the_best_set_only_where_there_is_a_matrix_unit():
    names = "import attn_ext; print(*attn_ext.available_cpu_capabilities())"
    with_unit = run("baseline", "-c", names).stdout.split()
    without = run("baseline", "-c", names, ATTN_EXT_MATRIX_UNIT="0").stdout.split()
    assert sorted(without) == sorted(with_unit)
    assert without[-1] != "amx"


def has_kernels_of_another_set(capability: str) -> bool:
    """For all dtypes but bfloat16, of a set whose tests run whole: the one in use, or else the first one."""
    alike = next((sets for sets in ALIKE if capability in sets), (capability,))
    whole = attn_ext.cpu_capability() if attn_ext.cpu_capability() in alike else alike[0]
    return capability != whole


def run_numerical(capability: str, some: str, **variables: str) -> subprocess.CompletedProcess[str]:
    files = [str(TESTS / name) for name in NUMERICAL]
    part = attn_ext.available_cpu_capabilities().index(capability) % PARTS_OF_BITS
    options = ["-q", "-x", "--device", "cpu", "-p", "no:cacheprovider", "-p", "no:logging"]
    options += [f"--bits={part}/{PARTS_OF_BITS}", "-k", some]
    return run(capability, "-m", "pytest", *options, *files, **variables)


EXPLAIN = """
import torch, attn_ext
query = torch.empty(64, 64, 16, 8, dtype=torch.bfloat16, device="{device}")
key = torch.empty(64, 64, 4096, 8, dtype=torch.bfloat16, device="{device}")
with torch.profiler.profile() as profile:
    explanation = attn_ext.explain(query, key, key, dropout_p=0.1)
assert explanation.path == "aten", explanation
assert not [e.name for e in profile.events() if e.name.startswith("aten::")]
print(explanation.scratch_bytes)
"""


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_explaining_the_composition_computes_nothing(where):
    done = run("aten", "-c", EXPLAIN.format(device=where))
    assert done.returncode == 0, done.stderr
    # scores; three tensors of floats, eight of int64 with dropout
    chunk = {"cpu": 2**20, "meta": 2**24}[where]
    assert int(done.stdout) <= chunk * (3 * 4 + 8 * 8)

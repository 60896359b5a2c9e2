"""Every memory allocation of a call may fail: one exception, and the next call is unharmed."""

import subprocess
import sys
from pathlib import Path

import pytest

import attn_ext

FAULTS = Path(__file__).parent / "fuzz" / "faults.py"
QUICK = ("few_rows/plain/sdpa*", "few_keys/careful*/sdpa*", "tiles/bias/sdpa", "tiles/careful_threads/*")
QUICK += ("*/threads/sdpa", "*/dropout/sdpa", "*/transposed/sdpa", "*/broadcast/sdpa", "split/careful/*")
QUICK += ("packed/plain", "packed/holes/forward", "paged/decode", "paged/int8", "paged/careful")
QUICK += ("cache_write/*", "merge/plain")
# The composition allocates hundreds of times in a call, and every time is a call and one to compare with.
COMPOSITION = ("few_rows/plain/sdpa", "packed/short/forward", "paged/short")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="malloc is replaced by preloading")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FAULTS), *arguments], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_a_failed_allocation_is_one_exception():
    printed = run("--capability", attn_ext.cpu_capability(), *(f"--only={pattern}" for pattern in QUICK))
    assert " 0 wrong" in printed
    failed = int(printed.splitlines()[-1].split()[0])
    assert failed > 500, printed
    assert "bad_alloc" in printed and "DefaultCPUAllo" in printed, printed


@pytest.mark.slow
def test_a_failed_allocation_of_the_composition_is_one_exception():
    assert " 0 wrong" in run("--capability", "aten", *(f"--only={pattern}" for pattern in COMPOSITION))


def test_every_none_is_refused():
    command = [sys.executable, str(FAULTS), "--every", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "--every: expected a number of 1 or more, got 0" in done.stderr

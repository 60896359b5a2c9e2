"""Calls from several threads at once, and in the children of a fork."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import _C
from attn_ext.testing import DTYPES, on_threads

# (batch, heads, Lq, Lk, D): large enough for several threads, on every path of the forward
SHAPES = [(2, 4, 150, 150, 32), (1, 3, 80, 1500, 20), (2, 4, 20, 2500, 24), (4, 8, 1, 3000, 16)]
OPTIONS = [{}, {"is_causal": True, "query_offset": 7}, {"softcap": 3.0}, {"window_left": 100}]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
HANGS_AFTER = 120  # seconds; the work itself takes less than one


def make_jobs() -> list:
    """Calls of forward and backward, of every shape and dtype."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    jobs = []
    for (batch, heads, lq, lk, d), options in zip(SHAPES, OPTIONS, strict=True):
        for dtype in DTYPES:
            inputs = [normal(batch, heads, length, d, dtype=dtype) for length in (lq, lk, lk)]
            bias = normal(lq, lk, dtype=dtype)
            grad = normal(batch, heads, lq, d, dtype=dtype)
            jobs.append(([*inputs, bias], grad, options))
    return jobs


def work(job) -> list[Tensor]:
    """Output, and the gradients of query, key, value and bias."""
    tensors, grad, options = job
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = attn_ext.sdpa(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def assert_same_bits(actual: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, e, strict=True))


@pytest.fixture(scope="module")
def jobs() -> list:
    return make_jobs()


@pytest.fixture(scope="module")
def expected(jobs) -> list[list[Tensor]]:
    return [work(job) for job in jobs]


def test_python_threads_get_the_bits_of_calls_in_turn(jobs, expected):
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert_same_bits(list(pool.map(work, jobs)), expected)


def test_python_threads_that_do_the_same_call_at_the_same_moment(jobs, expected):
    together = threading.Barrier(4)

    def start_together(job):
        together.wait()
        return work(job)

    with ThreadPoolExecutor(4) as pool:
        for job, answer in zip(jobs, expected, strict=True):
            assert_same_bits(list(pool.map(start_together, [job] * 4)), [answer] * 4)


def test_python_threads_with_other_numbers_of_threads(jobs, expected):
    def start(threads: int) -> None:
        torch.set_num_threads(threads)
        results[threads] = [work(job) for job in jobs]

    before = torch.get_num_threads()
    results: dict[int, list[list[Tensor]]] = {}
    team = [threading.Thread(target=start, args=(threads,)) for threads in (1, 2, 3, 8)]
    try:
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert len(results) == 4
    for result in results.values():
        assert_same_bits(result, expected)


def test_tasks_of_the_interpreter_s_own_threads(jobs, expected):
    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.attn_ext.sdpa(query, key, value, bias)

    @torch.jit.script
    def fork(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> list[Tensor]:
        waiting = [torch.jit.fork(attend, query, key, value, bias) for _ in range(6)]
        return [torch.jit.wait(task) for task in waiting]

    for (tensors, _, options), answer in zip(jobs, expected, strict=True):
        if not options:
            assert all(torch.equal(output, answer[0]) for output in fork(*tensors))


# fork


def raw(results: list[list[Tensor]]) -> list[list[bytes]]:
    return [[t.contiguous().view(torch.uint8).numpy().tobytes() for t in result] for result in results]


@contextlib.contextmanager
def children_that_hang_say_where():
    """What children of a fork are at when the test fails is in its report; they are ended then."""
    gc.collect()  # in a child, what earlier tests left could wait for threads that are not there
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    try:
        yield
    except BaseException:
        children = multiprocessing.active_children()
        for child in children:
            os.kill(child.pid, signal.SIGUSR1)
        time.sleep(1)
        for child in children:
            child.kill()
            child.join()
        raise
    finally:
        faulthandler.unregister(signal.SIGUSR1)


def in_child(function) -> list:
    """What `function` returns in a child process made by fork, which must end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with children_that_hang_say_where(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while there are threads
        child = context.Process(target=lambda: sender.send(function()))
        child.start()
        assert receiver.poll(HANGS_AFTER), "the child hangs"
        answer = receiver.recv()
        child.kill()
        child.join()
    return answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "query_len", "key_len"),
    [(1, 400, 400), (1, 100, 1000), (8, 64, 512), (1, 1000, 77), (8, 90, 64)],
)
def test_backward_of_one_key_head_is_work_for_several_threads(group, query_len, key_len, dtype):
    query = torch.randn(1, group, query_len, 64, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 1, key_len, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    output = attn_ext.sdpa(query, key, value, enable_gqa=True)

    def backward():
        torch.autograd.grad(output, (query, key, value), torch.ones_like(output))

    rounds = on_threads(8, lambda: _C.task_times(backward))
    assert sum(len(tasks) for _, tasks in rounds) >= 8


def test_a_fork_s_child_gets_the_same_bits_and_does_not_hang(jobs, expected):
    assert in_child(lambda: raw([work(job) for job in jobs])) == raw(expected)
    assert_same_bits([work(job) for job in jobs], expected)


def test_a_fork_s_child_without_gradients():
    query = torch.randn(2, 8, 256, 64)
    expected = raw([[attn_ext.sdpa(query, query, query)]])
    assert in_child(lambda: raw([[attn_ext.sdpa(query, query, query)]])) == expected


def derivatives() -> list[Tensor]:
    """In forward mode, and second ones: what goes through ATen's operators, here small outside the op."""
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(2, 4, 100, 32, generator=generator) for _ in range(3)]
    results = []
    for dtype in DTYPES:
        primals, tangents = [t.to(dtype) for t in inputs], [t.to(dtype) for t in inputs[::-1]]
        results += torch.func.jvp(attn_ext.sdpa, tuple(primals), tuple(tangents))
        leaves = [t.detach().requires_grad_() for t in primals]
        first = torch.autograd.grad(attn_ext.sdpa(*leaves), leaves, tangents[0], create_graph=True)
        results += torch.autograd.grad(first, leaves, tangents)
    return results


def test_a_fork_s_child_in_forward_mode_and_with_second_derivatives():
    expected = derivatives()
    for actual, e in zip(in_child(lambda: [t.tolist() for t in derivatives()]), expected, strict=True):
        torch.testing.assert_close(torch.tensor(actual, dtype=e.dtype), e)


def test_a_fork_in_a_fork_s_child(jobs, expected):
    assert in_child(lambda: in_child(lambda: raw([work(jobs[1])]))) == raw(expected[1:2])


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_fork_s_child_has_threads_of_its_own(jobs, expected):
    """Whether or not the parent had started any."""
    if torch.get_num_threads() == 1:
        pytest.skip("one thread is all there is")

    def answer() -> tuple[int, str, list]:
        before = threads_of_this_process()
        results = raw([work(job) for job in jobs])
        query = torch.empty(2, 8, 256, 64)
        return threads_of_this_process() - before, attn_ext.explain(query, query, query).reason, results

    started, reason, results = in_child(answer)
    assert started >= torch.get_num_threads() - 1
    assert "one thread" not in reason
    assert results == raw(expected)
    assert_same_bits([work(job) for job in jobs], expected)


FORK_IN_A_PARALLEL_REGION = """
import ctypes, os, sys, torch, attn_ext

torch.set_num_threads(2)
query = torch.randn(2, 8, 256, 64)
expected = attn_ext.sdpa(query, query, query)
openmp = ctypes.CDLL(str(attn_ext._library.LIBRARY_PATH))  # and what it is linked with
done = []

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def region(_):
    if openmp.omp_get_thread_num() != 0:
        return
    child = os.fork()
    if child == 0:
        same = torch.equal(attn_ext.sdpa(query, query, query), expected)
        reason = attn_ext.explain(query, query, query).reason
        os._exit(0 if same and "on one thread" in reason and "forked" in reason else 1)
    done.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

openmp.GOMP_parallel(region, None, 2, 0)
sys.exit(done[0])
"""


def test_a_fork_inside_a_parallel_region_leaves_one_thread_and_explain_says_so():
    program = [sys.executable, "-W", "ignore", "-c", FORK_IN_A_PARALLEL_REGION]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=HANGS_AFTER)
    assert done.returncode == 0, done.stderr


def test_a_fork_while_other_threads_are_at_work(jobs, expected):
    stop = threading.Event()

    def keep_working() -> None:
        while not stop.is_set():
            work(jobs[1])

    busy = threading.Thread(target=keep_working)
    busy.start()
    try:
        for _ in range(3):
            time.sleep(0.02)
            assert in_child(lambda: raw([work(jobs[1])])) == raw(expected[1:2])
    finally:
        stop.set()
        busy.join()


class Jobs(torch.utils.data.Dataset):
    """A data set whose samples are worked out with the operator."""

    def __init__(self, jobs: list) -> None:
        self.jobs = jobs

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, index: int) -> list[Tensor]:
        return work(self.jobs[index])


@pytest.mark.parametrize("workers", [1, 2])
def test_data_loader_workers(workers, jobs, expected):
    loader = torch.utils.data.DataLoader(
        Jobs(jobs),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork",
        timeout=HANGS_AFTER,
    )
    with children_that_hang_say_where(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        results = [[t.clone() for t in result] for result in loader]
    assert_same_bits(results, expected)


# more than one OpenMP runtime

OTHER_RUNTIME = """
#include <stdio.h>
#include <stdlib.h>
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  puts("GOMP_parallel of another library");
  abort();
}
"""
COMPARE = """
import torch, attn_ext
torch.set_num_threads(1)  # torch's own loops over threads may be given the other library's numbers
query = torch.randn(2, 8, 512, 64)
expected = attn_ext.reference.sdpa(query, query, query).to(query.dtype)
torch.set_num_threads(4)
for _ in range(5):
    torch.testing.assert_close(attn_ext.sdpa(query, query, query), expected)
"""


@pytest.mark.skipif(
    platform.system() != "Linux" or COMPILER is None, reason="needs ELF's versions of symbols and a compiler"
)
@pytest.mark.parametrize("names", ["omp_*", "omp_*; GOMP_*"])
@pytest.mark.parametrize("version", ["OMP_1.0", "OTHER_1.0"])
def test_another_runtime_before_torch_s_is_not_mixed_with_it(tmp_path, names, version):
    (tmp_path / "other.c").write_text(OTHER_RUNTIME)
    (tmp_path / "versions").write_text(f"{version} {{ global: {names}; local: *; }};\n")
    command = [COMPILER, "-x", "c", tmp_path / "other.c", "-shared", "-fPIC", "-o", tmp_path / "libother.so"]
    subprocess.run([*command, f"-Wl,--version-script={tmp_path / 'versions'}"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "libother.so")}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Python without a GIL


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded Python")
def test_the_import_does_not_bring_the_gil_back():
    program = (
        "import sys, torch; gil = sys._is_gil_enabled(); import attn_ext; assert sys._is_gil_enabled() == gil"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

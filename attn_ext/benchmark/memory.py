"""How much memory a task takes, beyond what the process held before it.

Each figure is of a process of its own that builds the model and runs the task once: what an allocator keeps
after one contender would hide what the next one takes. Some processes take more than others, by as much as
GPT-2's logits, whichever contender runs: the least of three is taken. The figure is the growth of the
resident set from before the call to its highest point, as Linux counts it (VmHWM), so it holds the outputs,
the gradients of a training step, and what a library loads or sets up when it is first called.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .models import Contenders, ModelError, Spec, load

__all__ = ["Peak", "peak"]

Peak = int | str
"""Bytes, or why there is no figure."""


def peak(spec: Spec, task: str, contender: str, threads: int, processes: int = 3) -> Peak:
    """Run the task once in each of so many new processes: the least of their peaks, or the first failure."""
    peaks = []
    for _ in range(processes):
        found = _peak_of_one(spec, task, contender, threads)
        if isinstance(found, str):
            return found
        peaks.append(found)
    return min(peaks)


def _peak_of_one(spec: Spec, task: str, contender: str, threads: int) -> Peak:
    work = json.dumps({"spec": asdict(spec), "task": task, "contender": contender, "threads": threads})
    command = [sys.executable, "-m", "attn_ext.benchmark.memory", work]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return int(done.stdout.splitlines()[-1])
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}, as for want of memory"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def growth(spec: Spec, task: str, contender: str, threads: int) -> int:
    """Bytes that the resident set of this process grows by, at most, while it runs the task once."""
    import torch

    torch.set_num_threads(threads)
    workload = load(spec)
    with Contenders(workload.model).using(contender):
        call = workload.prepare(task)
        _forget_peak()
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)


def _forget_peak() -> None:
    """From now on, not from when the model was built, where the kernel lets it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ModelError(f"this kernel does not say {field}: peak memory is measured on Linux only")


def main(text: str) -> None:
    work = json.loads(text)
    try:
        print(growth(Spec(**work["spec"]), work["task"], work["contender"], work["threads"]))
    except ModelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])

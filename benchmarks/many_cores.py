"""How a call would spread over more cores than this machine has.

    python benchmarks/many_cores.py
    python benchmarks/many_cores.py --cells llama-2048 --dtype bfloat16 --mode fwd --threads 64

A call is cut into tasks for so many threads. Here they run one after the other on one thread, and each is
timed; the least of some turns counts. Then they are dealt out as threads would take them, all of a round
before the next (csrc/cpu/task_queues.h): those of a queue in their order, each to the thread at that queue
that is free first. Where tasks take turns, each step of one is timed, and a thread waits where the task has
to wait for another one's step; the queues run one after the other, as if the threads at one had a cache of
their own. A call costs what it takes here to call two threads together and to wait for both, each
round but the first what two threads take that wait for each other in between, once for every doubling of the
threads. The efficiency is the time of the tasks on one thread over threads x finish: 1 is
perfect. What the call takes beside its tasks, memory from the system and back above all, has a column of
its own, in which the looks at the clock between steps are, too.

What it leaves out: caches and memory that cores share, and clocks that fall when many cores work. Decoding
is bound by memory: for it the table shows how evenly the bytes are dealt out.
"""

import argparse
import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

import attn_ext
from attn_ext import _C
from attn_ext.benchmark.cells import DTYPES, GRID, OUTSIDE, Cell, Problem, Shape, make_problem

#: Cells and their efficiency at 64 threads, at the least.
WANTED = {
    "gpt2-1024": 0.9,
    "llama-2048": 0.9,
    "sd-self-4096": 0.9,
    "whisper-1500": 0.9,
    "bias-1024": 0.8,
    "decode-32768": 0.9,
}
OWN = [Cell("decode-32768", Shape(1, 32, 8, 1, 32768, 128, 128))]
#: Seconds of work, then whether it waits for a lane or sets it, the lane (-1: the task's end), the number.
Step = tuple[float, bool, int, int]
Tasks = list[list[Step]]
#: Tasks of each queue, and how many threads it keeps at work.
Queues = list[tuple[int, int]]
Rounds = list[tuple[Queues, Tasks]]


def call_of(problem: Problem) -> Callable[[], object]:
    """One call: forward, or backward alone over a forward that is made once."""
    cell = problem.cell

    def forward() -> torch.Tensor:
        return attn_ext.sdpa(
            problem.query,
            problem.key,
            problem.value,
            problem.attn_mask,
            is_causal=cell.is_causal,
            query_offset=cell.query_offset,
            enable_gqa=problem.grouped,
        )

    if problem.mode == "fwd":
        return forward
    output, inputs = forward(), problem.differentiable()
    return lambda: torch.autograd.grad(output, inputs, problem.grad_output, retain_graph=True)


def timed(call: Callable[[], object], threads: int, turns: int) -> tuple[Rounds, float]:
    """The least time of each task, when the call is cut for so many threads, and of what lies beside them."""
    torch.set_num_threads(threads)
    call()
    tasks, beside = [], []
    for _ in range(turns):
        start = time.perf_counter()
        rounds = _C.task_times(call)
        whole = time.perf_counter() - start
        tasks.append(rounds)
        beside.append(whole - work(rounds))
    torch.set_num_threads(1)
    least = [
        (rounds[0][0], [least_steps(same) for same in zip(*(tasks for _, tasks in rounds), strict=True)])
        for rounds in zip(*tasks, strict=True)
    ]
    return [round for round in least if round[1]], min(beside)


def least_steps(same: Sequence[Sequence[Step]]) -> list[Step]:
    """Of the same task in several turns."""
    return [(min(step[0] for step in steps), *steps[0][1:]) for steps in zip(*same, strict=True)]


def work(rounds: Rounds) -> float:
    """The seconds of all tasks."""
    return sum(step[0] for _, tasks in rounds for task in tasks for step in task)


class TaskQueues:
    """What threads take next, as in csrc/cpu/task_queues.h."""

    def __init__(self, queues: Queues, threads: int) -> None:
        ends = list(itertools.accumulate(count for count, _ in queues))
        self.left = [iter(range(end - count, end)) for end, (count, _) in zip(ends, queues, strict=True)]
        self.useful = [useful for _, useful in queues]
        places = [queue for queue, useful in enumerate(self.useful) for _ in range(min(useful, threads))]
        enough = max(threads, len(places))
        self.queue_of = [places[thread * len(places) // enough] for thread in range(threads)]
        self.at_work = [self.queue_of.count(queue) for queue in range(len(queues))]

    def take(self, thread: int) -> int | None:
        """The next task, None if there is no more."""
        while self.queue_of[thread] >= 0:
            task = next(self.left[self.queue_of[thread]], None)
            if task is not None:
                return task
            self.at_work[self.queue_of[thread]] -= 1
            self.useful[self.queue_of[thread]] = 0  # empty
            self.queue_of[thread] = self._choose()
        return None

    def _choose(self) -> int:
        open_queues = [queue for queue, useful in enumerate(self.useful) if useful]
        if not open_queues:
            return -1
        load = {queue: self.at_work[queue] / self.useful[queue] for queue in open_queues}
        free = (queue for queue in open_queues if load[queue] < 1)
        queue = next(free, min(open_queues, key=lambda queue: load[queue]))
        self.at_work[queue] += 1
        return queue


def finish(round: tuple[Queues, Tasks], threads: int) -> float:
    """When the last task ends."""
    queues, tasks = round
    work = TaskQueues(queues, threads)
    free = [(0.0, thread) for thread in range(threads)]
    lanes: dict[int, list[tuple[int, float]]] = {}  # the numbers that each was set to, and when
    end = 0.0
    while free:
        now, thread = heapq.heappop(free)
        task = work.take(thread)
        if task is None:
            continue
        for seconds, waits, lane, number in tasks[task]:
            now += seconds
            if waits:
                now = max(now, min(when for reached, when in lanes[lane] if reached >= number))
            elif lane >= 0:
                lanes.setdefault(lane, []).append((number, now))
        end = max(end, now)
        heapq.heappush(free, (now, thread))
    return end


def round_costs() -> tuple[float, float]:
    """Seconds that it takes to call two threads together and to wait for both, and, once they are there, from
    the last task of a round to the first of the next."""
    one, many = _seconds_beside_tasks(1), _seconds_beside_tasks(9)
    return one, max(many - one, 0.0) / 8


def _seconds_beside_tasks(rounds: int, task: float = 5e-6) -> float:
    medians = []
    for _ in range(5):
        medians.append(statistics.median(_C.time_of_rounds(rounds, 2, task) for _ in range(1000)))
    return max(min(medians) - rounds * task, 0.0)


def with_progress(cases: list[tuple[Cell, str, str]]) -> Iterable[tuple[Cell, str, str]]:
    try:
        from tqdm import tqdm
    except ImportError:  # the extra `bench` brings it
        return cases
    return tqdm(cases, unit="cell", disable=None)


def main() -> None:
    cells = {cell.name: cell for cell in [*GRID, *OUTSIDE, *OWN]}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=cells, default=list(WANTED), metavar="NAME")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="+", choices=["fwd", "bwd"], default=["fwd", "bwd"])
    parser.add_argument("--threads", nargs="+", type=int, default=[8, 16, 64, 128, 192])
    parser.add_argument("--turns", type=int, default=5, help="of which the least time of a task counts")
    options = parser.parse_args()

    first, further = round_costs()
    print(f"two threads: called together {first * 1e6:.2f} us, a further round {further * 1e6:.2f} us\n")
    columns = " | ".join(f"{threads} threads" for threads in options.threads)
    print(f"| cell | one thread | beside | {columns} | wanted at 64 | tasks at {options.threads[-1]} |")
    print("|---" * (len(options.threads) + 5) + "|")
    cases = [
        (cells[name], dtype, mode)
        for name in options.cells
        for mode in options.mode
        for dtype in options.dtype
    ]
    for cell, dtype, mode in with_progress(cases):
        if mode == "bwd" and cell.name.startswith("decode"):
            continue
        call = call_of(make_problem(cell, mode, DTYPES[dtype]))
        rounds, beside = timed(call, 1, options.turns)
        one = work(rounds)
        row = []
        for threads in options.threads:
            rounds, _ = timed(call, threads, options.turns)
            steps = max(threads - 1, 0).bit_length()
            waits = steps * (first + (len(rounds) - 1) * further)
            whole = waits + sum(finish(round, threads) for round in rounds)
            row.append(f"{one / (threads * whole):.2f}")
        counts = [len(tasks) for _, tasks in rounds]
        tasks = " + ".join(
            str(count) if same == 1 else f"{same} x {count}"
            for count, same in ((count, len(list(group))) for count, group in itertools.groupby(counts))
        )
        name = f"{cell.name} {mode} {dtype} | {one * 1e3:.2f} ms | {beside * 1e3:.2f} ms"
        print(f"| {name} | {' | '.join(row)} | {WANTED.get(cell.name, '')} | {tasks} |", flush=True)


if __name__ == "__main__":
    main()

"""How long calls take that are compared with each other.

Blocks of calls alternate: ours, a peer, ours, a peer, ... The first calls of a block do not count, because
the thread pools of different runtimes go on spinning for a while after their last call. What counts is the
median of the blocks' medians. A ratio of two contenders of one run is a figure; of two runs, on a machine
that others use too, it is not.

Others can also spoil a ratio within a run. A call on several threads waits for the last of them: where
another program keeps one processor, every call takes a time slice of some milliseconds, whatever its work,
and its blocks agree with each other to a percent, while a call on one thread beside it runs undisturbed. So
two things are looked at: by how much blocks differ, and how long threads stood in line for a processor.
Blocks that stalled do not count and are measured once more; a contender of whom too few are left was not
measured.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

__all__ = ["UNSTEADY", "Block", "Method", "SumTiming", "Timing", "alternate", "cpu_waits"]

SHORTEST_SAMPLE = 50e-6  # shorter calls are timed several at once
FEWEST_SAMPLES = 3  # of a block, unless a single one is longer than the block
FEWEST_BLOCKS = 3  # of a contender, however slow
#: Of a block's time, that one thread may stand in line for a processor.
MOST_WAITING = 0.25
#: A block that takes so many times as long as the fastest has stalled: no work varies by that much.
STALLED = 2.0
#: Blocks that differ by more than this part of their median make a rough figure.
UNSTEADY = 0.1


def cpu_waits() -> dict[str, float]:
    """Seconds that each thread of this process has stood in line for a processor, as Linux counts them; empty
    where it does not."""
    waits = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waits[file.parent.name] = int(file.read_text().split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
            continue
    return waits


@dataclass(frozen=True)
class Method:
    """How long and how often."""

    block: float = 0.3
    """Seconds of a block of calls."""
    rounds: int = 5
    """Blocks of each contender."""
    limit: float = 10.0
    """Seconds after which a slow contender has had enough, whatever the rounds, but for its first three."""


@dataclass(frozen=True)
class Block:
    """Calls one after the other."""

    samples: list[float]  # seconds of a call
    waiting: float = 0.0
    """The share of its time that a thread stood in line for a processor: the one that did so longest."""

    @property
    def seconds(self) -> float:
        """The median time of a call."""
        return statistics.median(self.samples)


@dataclass
class Timing:
    """The blocks of one contender."""

    call: Callable[[], object]
    blocks: list[Block] = field(default_factory=list)
    spent: float = 0.0
    calls_per_sample: int = 1

    @property
    def samples(self) -> list[float]:
        """Of all blocks."""
        return [sample for block in self.blocks for sample in block.samples]

    @property
    def steady(self) -> list[Block]:
        """The blocks that did not stall."""
        quiet = [block for block in self.blocks if block.waiting <= MOST_WAITING]
        fastest = min((block.seconds for block in quiet), default=0.0)
        return [block for block in quiet if block.seconds <= STALLED * fastest]

    @property
    def seconds(self) -> float | None:
        """The time of a call, by the median of the blocks; None if more of them stalled than not."""
        steady = self.steady
        if 2 * len(steady) < len(self.blocks):
            return None
        return statistics.median(block.seconds for block in steady)

    @property
    def spread(self) -> float | None:
        """What lies between the quartiles of the blocks, as a part of their median; None of a single block.

        One block in five may be anywhere without a change of it.
        """
        seconds = [block.seconds for block in self.steady]
        if len(seconds) < 2:
            return None
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return (high - low) / middle

    def sample(self) -> float:
        """The time of a call, now."""
        call, calls = self.call, self.calls_per_sample
        start = perf_counter()
        for _ in range(calls):
            call()
        return (perf_counter() - start) / calls

    def run_block(self, seconds: float) -> Block:
        """A block of calls. What is dropped: a tenth of the block, and at least a call, unless calls are
        longer than blocks, where only the very first is."""
        begin = perf_counter()
        self._warm_up(begin, seconds)
        before, start = cpu_waits(), perf_counter()
        samples: list[float] = []
        while True:
            samples.append(self.sample())
            enough = len(samples) >= FEWEST_SAMPLES or min(samples) * self.calls_per_sample > seconds
            if enough and perf_counter() - begin >= seconds:
                break
        now = perf_counter()
        longest = max((wait - before.get(who, 0.0) for who, wait in cpu_waits().items()), default=0.0)
        self.blocks.append(Block(samples, longest / (now - start)))
        self.spent += now - begin
        return self.blocks[-1]

    def _warm_up(self, begin: float, seconds: float) -> None:
        """The calls that are dropped, which also say how many make a sample."""
        if self.blocks and min(self.blocks[-1].samples) > seconds:
            return
        latest = self.sample()
        while perf_counter() - begin < seconds / 10:
            latest = self.sample()
        self.fill_sample(latest)

    def fill_sample(self, latest: float) -> None:
        """Take so many calls together, by the latest time of one, that the clock can tell them apart."""
        if latest * self.calls_per_sample < SHORTEST_SAMPLE:
            self.calls_per_sample = min(1000, max(1, round(SHORTEST_SAMPLE / latest)))


@dataclass
class SumTiming(Timing):
    """Calls of which each is timed by itself: the time is the sum of theirs, each as often as it counts.

    Without what lies between them, as a loop over them has it.
    """

    parts: Sequence[tuple[int, Timing]] = ()

    def sample(self) -> float:
        """The sum of the times of the calls, now."""
        total = 0.0
        for count, part in self.parts:
            seconds = part.sample()
            part.fill_sample(seconds)
            total += count * seconds
        return total

    def fill_sample(self, latest: float) -> None:
        """The parts do that, each for itself."""


def alternate(
    calls: Mapping[str, Callable[[], object] | Timing],
    method: Method,
    on_block: Callable[[str, int], None] = lambda name, turn: None,
) -> dict[str, Timing]:
    """Time the calls against each other, and blocks that stalled once more, in as many rounds again at most.

    ``on_block`` hears the name of each block that is about to run, and its round.
    """
    timings = {name: call if isinstance(call, Timing) else Timing(call) for name, call in calls.items()}
    gc.collect()
    gc.disable()
    try:
        for turn in range(2 * method.rounds):
            again = turn >= method.rounds
            for name, timing in timings.items():
                if again and len(timing.steady) >= min(len(timing.blocks), method.rounds):
                    continue
                on_block(name, turn)
                if len(timing.blocks) < FEWEST_BLOCKS or timing.spent < method.limit:
                    timing.run_block(method.block)
    finally:
        gc.enable()
    return timings

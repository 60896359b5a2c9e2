"""How long calls take that are compared with each other.

Blocks of calls alternate: ours, a peer, ours, a peer, ... The first calls of a block do not count, because
the thread pools of different runtimes go on spinning for a while after their last call. What counts is the
median. A ratio of two contenders of one run is a figure; of two runs, on a machine that others use too, it is
not.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Method", "Timing", "alternate"]

SHORTEST_SAMPLE = 50e-6  # shorter calls are timed several at once


@dataclass(frozen=True)
class Method:
    """How long and how often."""

    block: float = 0.3
    """Seconds of a block of calls."""
    rounds: int = 5
    """Blocks of each contender."""
    limit: float = 10.0
    """Seconds after which a slow contender has had enough, whatever the rounds."""


@dataclass
class Timing:
    """The calls of one contender."""

    call: Callable[[], object]
    samples: list[float] = field(default_factory=list)
    spent: float = 0.0
    calls_per_sample: int = 1

    @property
    def seconds(self) -> float:
        """The median time of a call."""
        return statistics.median(self.samples)

    def sample(self) -> float:
        """The time of a call, now."""
        call, calls = self.call, self.calls_per_sample
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    def run_block(self, seconds: float) -> None:
        """A block of calls. What is dropped: a tenth of the block, and at least a call, unless calls are
        longer than blocks, where only the very first is."""
        begin = time.perf_counter()
        slow = bool(self.samples) and self.samples[-1] > seconds
        latest = self.samples[-1] if slow else self.sample()
        while time.perf_counter() - begin < seconds / 10:
            latest = self.sample()
        if latest * self.calls_per_sample < SHORTEST_SAMPLE:
            self.calls_per_sample = min(1000, max(1, round(SHORTEST_SAMPLE / latest)))
        while True:
            self.samples.append(self.sample())
            if time.perf_counter() - begin >= seconds:
                break
        self.spent += time.perf_counter() - begin


def alternate(
    calls: Mapping[str, Callable[[], object]],
    method: Method,
    on_block: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Time the calls against each other; ``on_block`` hears the name of each block that is about to run."""
    timings = {name: Timing(call) for name, call in calls.items()}
    gc.collect()
    gc.disable()
    try:
        for _ in range(method.rounds):
            for name, timing in timings.items():
                on_block(name)
                if not timing.samples or timing.spent < method.limit:
                    timing.run_block(method.block)
    finally:
        gc.enable()
    return timings

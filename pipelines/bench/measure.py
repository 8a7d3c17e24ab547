"""Time rivals in turns: a shared machine slows all of a round, so the round's ratios hold."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

MIN_PASS_S = 0.1


@dataclass(frozen=True, slots=True)
class Speed:
    """What one subject reached; rounds in order."""

    gb_per_s: tuple[float, ...]
    """Decimal gigabytes of features per second of wall clock."""
    cpu_s_per_gb: float
    """Median over the rounds, of this process."""

    @property
    def median_gb_per_s(self) -> float:
        return median(self.gb_per_s)

    def over(self, other: "Speed") -> float:
        """Median over rounds of how many times faster this was than ``other`` in the same round."""
        return median(mine / theirs for mine, theirs in zip(self.gb_per_s, other.gb_per_s, strict=True))


def interleaved(
    subjects: Mapping[str, Callable[[], object]], *, nbytes: int, rounds: int = 5
) -> dict[str, Speed]:
    """Let each subject read the same ``nbytes``, in turns, ``rounds`` times.

    Caches are warm: each subject reads everything once before it is timed. Within a round the
    order is turned, so that nobody always comes after the same neighbour.
    """
    for read in subjects.values():
        read()
    names = list(subjects)
    walls: dict[str, list[float]] = {name: [] for name in names}
    cpus: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu = _timed(subjects[name])
            walls[name].append(nbytes / 1e9 / wall)
            cpus[name].append(cpu / (nbytes / 1e9))
    return {name: Speed(tuple(walls[name]), median(cpus[name])) for name in names}


def _timed(read: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one pass, from as many as fill :data:`MIN_PASS_S`."""
    passes, wall, cpu = 0, time.perf_counter(), time.process_time()
    while passes == 0 or time.perf_counter() - wall < MIN_PASS_S:
        read()
        passes += 1
    return (time.perf_counter() - wall) / passes, (time.process_time() - cpu) / passes

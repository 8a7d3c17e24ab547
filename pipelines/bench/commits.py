"""Many writers, one lake: what is lost, what is doubled, what a commit costs.

Each writer is a process of its own with a client of its own. Two of them share every plan, so that
races are won and lost; some of the names they need are fenced off as retention would, and some
writers are late: they meet at their commit a name that was taken while they wrote.
"""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from features.commits import CommitName, encode_commit
from features.errors import ObjectExistsError
from features.lake import Lake
from features.schema import SelectionFilter, TargetVersion
from features.testing import TINY_TARGET, register_tiny_version, tiny_head, tiny_window
from features.writer import write_fragment

JOIN_TIMEOUT_S = 540
FENCE_EVERY, LATE_EVERY, SHARED_EVERY = 7, 11, 5
"""Of a writer's commits: whose first attempt is fenced before, and whose while it writes; whose plan
its neighbour writes too."""


@dataclass(frozen=True, slots=True)
class ManyWriters:
    """What became of ``writers * commits_per_writer`` calls of the writer."""

    writers: int
    commits: int
    """Calls that returned."""
    outcomes: Mapping[str, int]
    plans: int
    """Different plans among them: what the lake must hold, once each."""
    lost: int
    """Plans that were acknowledged and are not in the lake."""
    duplicated: int
    """Windows that the lake holds more than once."""
    differing: int
    """Windows that do not read back bit for bit."""
    harmful: int
    """Findings of a full check, other than what a lost race leaves."""
    fenced: int
    """Commits that a fence turned away to the next attempt."""
    seconds: float
    p50_s: float
    p95_s: float

    @property
    def commits_per_s(self) -> float:
        return self.commits / self.seconds

    @property
    def p95_over_p50(self) -> float:
        return self.p95_s / self.p50_s


def _nothing() -> None:
    return None


def race_writers(
    url: str,
    *,
    writers: int,
    commits_per_writer: int,
    storage_options: Mapping[str, Any] | None = None,
    plain: bool = False,
    at_start: Callable[[], None] = _nothing,
    at_end: Callable[[], None] = _nothing,
) -> ManyWriters:
    """Let ``writers`` processes commit to a new lake at ``url`` at once, then audit every window.

    ``plain`` leaves fences and shared plans out. ``at_start`` is called when all writers are ready,
    ``at_end`` when all are done and nothing was audited yet.

    Raises:
        RuntimeError: a writer died.
    """
    options = dict(storage_options or {})
    register_tiny_version(Lake.init(url, TINY_TARGET, **options), 0, tiny_head())
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(writers + 1), context.Queue()
    arguments = (url, options, 0 if plain else writers, commits_per_writer, barrier, queue)
    processes = [context.Process(target=_writer, args=(number, *arguments)) for number in range(writers)]
    for process in processes:
        process.start()
    _wait_at(barrier, processes)
    at_start()
    _wait_at(barrier, processes)
    reports = _collected(queue, processes)
    at_end()
    for process in processes:
        process.join(JOIN_TIMEOUT_S)
    return _audited(Lake.open(url, **options), reports, writers)


def plan_of(writer: int, turn: int, writers: int) -> tuple[str, int]:
    """Plan id and sample of a writer's turn; every fifth one belongs to two neighbours among ``writers``."""
    even = writer - writer % 2
    owner = even if turn % SHARED_EVERY == 0 and even + 1 < writers else writer
    return f"w{owner:02d}-{turn:05d}", owner * 100_000 + turn


def _writer(
    number: int, url: str, options: dict[str, Any], writers: int, commits: int, barrier: Any, queue: Any
) -> None:
    lake, head = Lake.open(url, **options), tiny_head()
    lake.version(TargetVersion(0))
    turns = [(plan, tiny_window(head, sample=sample), turn)
             for turn in range(commits) for plan, sample in [plan_of(number, turn, writers)]]  # fmt: skip
    done: list[tuple[str, str, float, int]] = []
    barrier.wait()  # all are ready
    barrier.wait()  # and whoever counts has begun to
    begin = time.time()
    for plan, window, turn in turns:
        fence = CommitName(0, plan, 0).path
        mine = writers > 0 and turn % SHARED_EVERY != 0  # a shared plan could be committed already
        if mine and turn % FENCE_EVERY == 1:
            _fence(lake, fence)

        def on_step(step: str, *, late: bool = mine and turn % LATE_EVERY == 2, fence: str = fence) -> None:
            if late and step == "data/tokens.arrow":
                _fence(lake, fence)

        start = time.perf_counter()
        result = write_fragment(
            lake, version=TargetVersion(0), head_id=head.head_id, plan_id=plan, windows=[window],
            writer_id=f"writer-{number}", on_step=on_step,
        )  # fmt: skip
        done.append((plan, result.outcome, time.perf_counter() - start, result.attempt))
    queue.put((begin, time.time(), done))


def _fence(lake: Lake, path: str) -> None:
    try:
        lake.store.create(path, encode_commit([]))
    except ObjectExistsError:
        return


def _wait_at(barrier: Any, processes: list[Any]) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while barrier.n_waiting < len(processes):
        if any(process.exitcode is not None for process in processes) or time.monotonic() > deadline:
            _give_up(processes)
        time.sleep(0.02)
    barrier.wait(JOIN_TIMEOUT_S)


def _give_up(processes: list[Any]) -> NoReturn:
    for process in processes:
        process.kill()
    raise RuntimeError("a writer died or did not end in time; its traceback is on stderr")


def _collected(queue: Any, processes: list[Any]) -> list[Any]:
    reports: list[Any] = []
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while len(reports) < len(processes):
        if not queue.empty():
            reports.append(queue.get())
        elif any(process.exitcode not in (None, 0) for process in processes) or time.monotonic() > deadline:
            _give_up(processes)
        else:
            time.sleep(0.02)
    return reports


def _audited(lake: Lake, reports: list[Any], writers: int) -> ManyWriters:
    # Here, so that writers, which import this module too, start without polars.
    from features.catalog import Catalog
    from features.check import check_lake

    done = [entry for _, _, entries in reports for entry in entries]
    begin, end = min(report[0] for report in reports), max(report[1] for report in reports)
    # Fenced turns write twice by design; what a crowd does to a plain commit is in the others.
    times = sorted(seconds for _, outcome, seconds, attempt in done if outcome == "committed" and not attempt)
    plans = {plan for plan, *_ in done}
    catalog = Catalog.load(lake)
    rows = catalog.frame.to_dicts()
    held = Counter((row["sample_id"], row["start"]) for row in rows)
    return ManyWriters(
        writers=writers,
        commits=len(done),
        outcomes=dict(Counter(outcome for _, outcome, _, _ in done)),
        plans=len(plans),
        lost=len(plans - {row["plan_id"] for row in rows}),
        duplicated=sum(count - 1 for count in held.values()),
        differing=_differing(lake, catalog.select(SelectionFilter()).rows),
        harmful=sum(finding.harmful for finding in check_lake(lake, 1)),
        fenced=sum(attempt > 0 for *_, attempt in done),
        seconds=end - begin,
        p50_s=float(np.quantile(times, 0.5)),
        p95_s=float(np.quantile(times, 0.95)),
    )


def _differing(lake: Lake, rows: Sequence[Mapping[str, Any]]) -> int:
    head, differing = tiny_head(), 0
    for row in rows:
        found = lake.read_window(row)
        expected = tiny_window(head, sample=int(row["sample_id"].rpartition("s")[2]))
        pairs = [
            (found.aux, expected.aux),
            (found.final, expected.final),
            (found.token_ids, expected.token_ids),
        ]
        differing += not all(np.array_equal(left, right) for left, right in pairs)
    return differing

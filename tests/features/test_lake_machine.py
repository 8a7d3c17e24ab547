"""Any order of append, crash, retry, conflict, zombie, compact, prune, retain and gc: what was acknowledged
and not given up is there once, bit for bit; nothing else is; nothing is harmed."""

import os
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from features.catalog import Catalog
from features.check import check_lake
from features.compaction import compact, prune_commits
from features.errors import PlanConflictError
from features.gc import GcPolicy, apply_gc, plan_gc
from features.lake import Lake
from features.retention import RetentionPolicy, apply_retention, fragment_facts, plan_retention
from features.schema import SelectionFilter, TargetVersion
from features.survey import survey
from features.testing import TINY_TARGET, register_tiny_version, tiny_head, tiny_window
from features.windows import Window
from features.writer import WRITE_STEPS, CommitResult, write_fragment

VERSIONS = 3
PLANS = 4
SOAK = "DRAFTLAKE_SOAK" in os.environ

versions = st.integers(0, VERSIONS - 1)
plans = st.integers(0, PLANS - 1)


class KilledError(Exception):
    pass


class LakeMachine(RuleBasedStateMachine):
    """Each rule opens the lake anew, as another process would; clocks run ahead so that every grace is over."""

    @initialize()
    def make(self) -> None:
        self.url = f"memory://machine/{uuid.uuid4().hex}"
        lake = Lake.init(self.url, TINY_TARGET)
        self.heads = [tiny_head(number) for number in range(VERSIONS)]
        for number, head in enumerate(self.heads):
            register_tiny_version(lake, number, head)
        self.held: set[tuple[int, int]] = set()
        self.now = datetime.now(UTC) + timedelta(days=1)

    def later(self) -> datetime:
        self.now += timedelta(days=3)
        return self.now

    def open(self) -> Lake:
        return Lake.open(self.url)

    def windows(self, version: int, plan: int, *, other: bool = False) -> list[Window]:
        first = 10 * plan + (1000 if other else 0)
        head = self.heads[version]
        return [tiny_window(head, version=version, sample=first + n, num_rows=5 + n) for n in range(2)]

    def write(
        self, version: int, plan: int, *, other: bool = False, on_step: Callable[[str], None] | None = None
    ) -> CommitResult:
        return write_fragment(
            self.open(), version=TargetVersion(version), head_id=self.heads[version].head_id,
            plan_id=f"plan{plan}", windows=self.windows(version, plan, other=other), writer_id="machine",
            on_step=on_step,
        )  # fmt: skip

    @rule(version=versions, plan=plans)
    def append(self, version: int, plan: int) -> None:
        again = (version, plan) in self.held
        assert self.write(version, plan).outcome == ("duplicate_plan" if again else "committed")
        self.held.add((version, plan))

    @rule(version=versions, plan=plans, step=st.sampled_from(WRITE_STEPS))
    def crash(self, version: int, plan: int, step: str) -> None:
        def die(name: str) -> None:
            if name == step:
                raise KilledError

        try:
            self.write(version, plan, on_step=die)
        except KilledError:
            if step == "commit":
                self.held.add((version, plan))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def conflict(self, data: st.DataObject) -> None:
        version, plan = data.draw(st.sampled_from(sorted(self.held)))
        try:
            self.write(version, plan, other=True)
        except PlanConflictError:
            return
        raise AssertionError("other tokens under a plan that is committed were taken")

    @rule(version=versions, plan=plans)
    def zombie(self, version: int, plan: int) -> None:
        """A writer sleeps before its commit for so long that gc takes it for dead."""

        def sleep(name: str) -> None:
            if name == WRITE_STEPS[-2] and not slept:
                slept.append(name)
                self.gc()

        slept: list[str] = []
        result = self.write(version, plan, on_step=sleep)
        assert result.outcome == ("duplicate_plan" if (version, plan) in self.held else "committed")
        assert bool(slept) == (result.outcome == "committed")
        self.held.add((version, plan))

    @rule(version=versions, plan=plans)
    def race(self, version: int, plan: int) -> None:
        """Another writer of the same plan commits just before we do."""
        again = (version, plan) in self.held

        def overtake(name: str) -> None:
            if name == WRITE_STEPS[-2]:
                assert self.write(version, plan).outcome == "committed"

        assert self.write(version, plan, on_step=overtake).outcome == "duplicate_plan"
        assert again or (version, plan) not in self.held
        self.held.add((version, plan))

    @rule()
    def compact(self) -> None:
        before = Catalog.load(self.open()).revision
        compact(self.open(), now=self.later)
        assert Catalog.load(self.open()).revision == before

    @rule()
    def prune(self) -> None:
        before = Catalog.load(self.open()).revision
        prune_commits(self.open(), grace=timedelta(days=2), now=self.later())
        assert Catalog.load(self.open()).revision == before

    @rule()
    def retain(self) -> None:
        lake, now = self.open(), self.later()
        facts = fragment_facts(lake, lake.store.scan("data"))
        plan = plan_retention(facts, RetentionPolicy(keep_versions=1), (), now=now)
        apply_retention(lake, plan, now=now, reason="machine")
        newest = max((version for version, _ in self.held), default=None)
        self.held = {(version, plan) for version, plan in self.held if version == newest}

    @rule()
    def gc(self) -> None:
        lake = self.open()
        apply_gc(lake, plan_gc(survey(lake), GcPolicy(), now=self.later()))

    @invariant()
    def the_lake_holds_what_was_acknowledged(self) -> None:
        lake = self.open()
        rows = Catalog.load(lake).select(SelectionFilter()).rows
        found = {(row["target_version"], row["sample_id"]): row for row in rows}
        expected = {
            (version, window.meta.sample_id): window
            for version, plan in self.held
            for window in self.windows(version, plan)
        }
        assert found.keys() == expected.keys()
        assert len(rows) == len(found)
        for key, window in expected.items():
            stored = lake.read_window(found[key])
            np.testing.assert_array_equal(stored.aux, window.aux)
            np.testing.assert_array_equal(stored.final, window.final)
            np.testing.assert_array_equal(stored.token_ids, window.token_ids)

    def teardown(self) -> None:
        if not hasattr(self, "url"):
            return
        assert not [finding for finding in check_lake(self.open(), 2) if finding.harmful]
        self.compact()
        for _ in range(2):  # the first run leaves spent tombstones for the second
            self.gc()
        assert {finding.code for finding in check_lake(self.open(), 2)} == set()
        self.the_lake_holds_what_was_acknowledged()
        self.open().store.delete_prefix("")


TestLakeMachine = LakeMachine.TestCase
TestLakeMachine.settings = settings(
    max_examples=200 if SOAK else 8,
    stateful_step_count=40 if SOAK else 12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

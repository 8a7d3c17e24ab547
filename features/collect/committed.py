"""What the lake holds already of one version and layout, so that nothing is collected twice."""

from typing import Any, Literal

import numpy as np
import pyarrow as pa

from features.collect.cut import window_mask, with_next
from features.collect.rollouts import Rollout
from features.collect.sampling import WindowSpan
from features.commits import TokenRow
from features.lake import Lake
from features.schema import NO_TOKEN, FragmentLayout, TargetVersion
from features.snapshots import commits_of

_TOKEN_COLUMNS = [
    "target_id", "sample_id", "start", "num_rows", "sequence_length", "data_prefix", "window_index", "crc32c_tokens",
]  # fmt: skip
"""What reading a window's tokens needs of its commit row."""

Comparison = Literal["new", "same", "conflict"]


class CommittedSpans:
    """Windows of one version and layout by sample, as committed when this was made.

    Reads the version's commits once; token tables only when a sample turns up again. Two runs
    at the same time may still both collect a sample: their equal plans meet in the commit.
    """

    def __init__(self, lake: Lake, *, version: TargetVersion, layout: FragmentLayout) -> None:
        self._lake = lake
        self._places: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._known: dict[str, tuple[str, int, int]] = {}
        for table in commits_of(lake, version):
            self._take_in(table, layout)

    def compare(self, rollout: Rollout, spans: tuple[WindowSpan, ...]) -> Comparison:
        """``same`` when all spans are there with equal group, tokens and masks, ``conflict`` when one differs."""
        known = self._known.get(rollout.sample_id)
        if known is None:
            return "new"
        if known != (rollout.group_id, rollout.prompt_length, len(rollout.token_ids)):
            return "conflict"
        places = [self._places.get((rollout.sample_id, span.start, span.num_rows)) for span in spans]
        for span, place in zip(spans, places, strict=True):
            if place is None:
                continue
            if not self._lake.read_tokens(place).same_tokens(_token_row(rollout, span)):
                return "conflict"
        return "new" if None in places else "same"

    def _take_in(self, table: pa.Table, layout: FragmentLayout) -> None:
        # Whatever its layout: a sample id names one rollout at a version.
        for row in table.select(["sample_id", "group_id", "prompt_length", "sequence_length"]).to_pylist():
            self._known[row["sample_id"]] = (row["group_id"], row["prompt_length"], row["sequence_length"])
        for row in table.filter(_of_layout(table, layout)).select(_TOKEN_COLUMNS).to_pylist():
            self._places[row["sample_id"], row["start"], row["num_rows"]] = row


def _of_layout(table: pa.Table, layout: FragmentLayout) -> pa.Array:
    """Which rows of a commit have this layout; a fragment has one, but rows are what we read."""
    ids = list(layout.layer_ids)
    pairs = zip(table["layer_ids"].to_pylist(), table["dtype"].to_pylist(), strict=True)
    return pa.array([found == ids and dtype == layout.dtype.value for found, dtype in pairs], pa.bool_())


def _token_row(rollout: Rollout, span: WindowSpan) -> TokenRow:
    """Token arrays of ``span`` as the lake would hold them."""
    return TokenRow(
        start=span.start,
        token_ids=with_next(rollout.token_ids, span, NO_TOKEN, np.int32),
        sampled_mask=window_mask(rollout.sampled_mask, span),
        loss_mask=None if rollout.loss_mask is None else window_mask(rollout.loss_mask, span),
        logprobs=np.zeros(0, np.float32),  # a measurement: not compared
    )

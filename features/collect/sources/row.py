"""One row of a source on its way to rollouts: where it stands, and what it becomes."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from features.collect.rollout import Rollout, logprob_value
from features.collect.rollouts import RecordError
from features.collect.sources.partitions import SourceOptions, SourcePartition
from features.collect.sources.records import Record
from features.collect.sources.versions import UNKNOWN, VersionFacts, named_by_user, numeric_label


class Padding(Enum):
    """A row that a framework added to fill a batch."""

    ROW = "pad row"


Item = Rollout | RecordError | Padding
"""What a sequence of a row becomes."""


@dataclass(frozen=True, slots=True)
class Row:
    """Place of a row and the statements of the user."""

    partition: SourcePartition
    number: int
    """Line or row, counted from 1 in the file."""
    options: SourceOptions

    def step_in_name(self, pattern: str) -> int | None:
        """The step that the file's path names: the first group of ``pattern``."""
        found = re.search(pattern, self.partition.url)
        return int(found[1]) if found else None

    def row_id(self, branch: int) -> str:
        """Digest of (bytes of the partition, row, branch)."""
        return digest_of(self.partition.digest, self.number, branch)

    def sequence(
        self,
        *,
        token_ids: Sequence[int],
        prompt_length: int,
        sampled: Sequence[bool],
        loss: Sequence[bool] | None = None,
        logprobs: Sequence[float | None] | None = None,
        logprob_kind: str = "engine_unknown",
        facts: VersionFacts = UNKNOWN,
        inferred: VersionFacts = UNKNOWN,
        token_source: str = "ids",
        branch: int = 0,
        **described: Any,
    ) -> Rollout:
        """The rollout of one sequence. Lists span the whole sequence.

        ``facts`` is what the record says of its weights, ``inferred`` what its step says; the latter
        counts only when the user states that the run was synchronous. The sample is named by what
        was sampled and by which version, so that copies of a row are one sample; the group by the
        prompt, because frameworks number groups anew at each step.
        """
        options, ids, mask = self.options, tuple(token_ids), tuple(sampled)
        if options.assume_synchronous and facts.says_nothing and inferred.version is not None:
            facts = replace(inferred, version_label=facts.version_label)
        if options.user_version is not None:
            facts, mask = named_by_user(facts, options.user_version, mask)
        values = None if logprobs is None else tuple(logprob_value(v) for v in logprobs)
        stated = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in described.items() if value is not None}
        return Rollout(
            **{
                "sample_id": digest_of(token_source, ids, facts.version),
                "group_id": digest_of("prompt", ids[:prompt_length]),
                **stated,
                **given,
            },
            token_ids=ids, prompt_length=prompt_length, sampled_mask=mask,
            loss_mask=None if loss is None else tuple(loss), logprobs=values,
            logprob_kind=None if values is None else options.logprob_kind or logprob_kind,
            version=facts.version, version_label=facts.version_label, version_min=facts.version_min,
            version_max=facts.version_max, version_spans=facts.version_spans,
            version_source=facts.version_source, token_source=token_source, branch=branch,
            source=self.partition.format, source_file=self.partition.url, source_row=self.number,
            row_id=self.row_id(branch),
        )  # fmt: skip

    def completed(self, rollout: Rollout) -> Rollout:
        """A rollout that names itself, with its place and the user's statements where it has none."""
        options = self.options
        values: dict[str, Any] = {
            "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k,
            "source": self.partition.format, "source_file": self.partition.url, "source_row": self.number,
            "row_id": self.row_id(rollout.branch or 0),
        }  # fmt: skip
        if rollout.logprobs is not None:
            values["logprob_kind"] = options.logprob_kind
        unknown = (None, "engine_unknown")
        missing = {
            name: value
            for name, value in values.items()
            if value is not None and getattr(rollout, name) in unknown
        }
        rollout = replace(rollout, **missing)
        if options.user_version is None:
            return rollout
        spans = rollout.version_spans
        facts = VersionFacts(
            rollout.version, rollout.version_source or "unknown", rollout.version_min, rollout.version_max,
            version_spans=spans, span_versions=tuple(numeric_label()(span.label) for span in spans or ()),
        )  # fmt: skip
        facts, sampled = named_by_user(facts, options.user_version, rollout.sampled_mask)
        if facts.version == rollout.version:
            return rollout
        return replace(rollout, version=facts.version, version_source="user", sampled_mask=sampled)


Reader = Callable[[Record, Row], Iterable[Item]]
"""Sequences of one record; a raised RecordError refuses the whole record, a yielded one its sequence."""


def digest_of(*parts: Any) -> str:
    """Digest of JSON values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

"""What is read, and what the user states about it that the files do not say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LogprobKind = Literal["engine_raw", "engine_processed", "engine_unknown"]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Statements of the user. They fill what a record leaves unknown and never overrule it."""

    assume_synchronous: bool = False
    """The run trained each batch right after sampling it: a version may be inferred from the step."""
    evaluation: bool = False
    """The files are of evaluations, which run after the update of their step."""
    user_version: int | None = None
    """Version of rollouts whose own is unknown or mixed; their windows stay unverified."""
    allow_retokenise: bool = False
    """Tokenise text of sources without token ids; their windows stay unverified."""
    tokenizer: str | None = None
    """Folder with the target's ``tokenizer.json``, for ``allow_retokenise``."""
    columns: Mapping[str, Any] | None = None
    """Our field to their column, for the format ``mapping``: :func:`~features.collect.sources.mapping.load_columns`."""
    label_offset: int = 0
    """Added to vLLM's numeric weight label to give the version; other sources fix it themselves."""
    logprob_kind: LogprobKind | None = None
    """What the engine recorded, where the source does not say; logprobs of unknown kind cannot verify."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Passed to fsspec for ``s3://``."""

    def as_mapping(self) -> dict[str, Any]:
        """What decides how bytes become rollouts, for plan ids and reports; holds no credentials."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del values["storage_options"]
        return values | {"columns": None if self.columns is None else dict(self.columns)}


@dataclass(frozen=True, slots=True)
class SourcePartition:
    """A file, or a part of one, that is read in one go; safe to send to another process."""

    name: str
    """The file's name within what was asked for, its url where two share one; a part has its place behind a ``#``."""
    url: str
    format: str
    nbytes: int
    """Stored bytes of this partition (compressed size of a compressed file)."""
    digest: str
    """Digest of format and stored bytes: equal content has an equal digest, wherever it lies."""
    start: int = 0
    """First byte of a part of a JSONL file, first row group of a part of a Parquet file."""
    stop: int | None = None
    """One past the last; None is the file's end."""
    first_row: int = 1
    """Number of the first line or row, counted from 1 in the whole file."""
    damage: str | None = None
    """Why nothing is read: bytes of a compressed file were changed, so that any row may be wrong."""


@dataclass(slots=True)
class SourceCounts:
    """What became of every line or row of a partition; :attr:`accounted` is true after a whole pass."""

    lines: int = 0
    """Lines or rows read."""
    more_records: int = 0
    """Sequences beyond the first of a line (leaves of a tree, choices of a response)."""
    rollouts: int = 0
    refused: int = 0
    duplicates: int = 0
    """Sequences whose (token ids, version) came before in the partition."""
    pad_rows: int = 0
    """Rows that a framework added to fill a batch."""
    blank: int = 0
    truncated: int = 0
    """1 when a compressed stream ends early or is damaged: that refusal has no line of its own."""

    @property
    def accounted(self) -> bool:
        """Whether every line and sequence is a rollout, refused, a duplicate, padding or blank."""
        fates = self.rollouts + self.refused + self.duplicates + self.pad_rows + self.blank
        return self.lines + self.more_records + self.truncated == fates

"""Write a fragment: data objects first, the commit last, each created and never overwritten.

A reader sees a fragment from the moment its commit exists, so a crash at any step leaves either
nothing visible or everything. Every attempt writes under a fresh uuid, so no retry and no late
writer can touch bytes that a commit names. docs/lake-format.md lists the crash points.
"""

import hashlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from features import aux_codec
from features.commits import CommitName, TokenRow, encode_commit, encode_tokens, meta_fields
from features.digests import canonical_json
from features.errors import (
    CorruptDataError,
    LakeContractError,
    ObjectExistsError,
    PlanConflictError,
    TargetMismatchError,
    VersionConflictError,
)
from features.fragments import TOKENS_FILE
from features.lake import Lake
from features.schema import FORMAT_VERSION, AuxCodec, FragmentLayout, HeadId, TargetVersion
from features.tombstones import FragmentName, is_hidden
from features.windows import Window, check_window
from features.zarr_layout import (
    ARRAY_FILE,
    GROUP_FILE,
    SHARD_KEY,
    ByteDtype,
    ShardLayout,
    crc32c,
    group_metadata,
    row_bytes_of,
)

log = logging.getLogger(__name__)

ARRAYS = ("aux", "final")
WRITE_STEPS = (
    f"data/{GROUP_FILE}",
    *(f"data/{array}/{name}" for array in ARRAYS for name in (ARRAY_FILE, SHARD_KEY)),
    f"data/{TOKENS_FILE}",
    "commit",
)
"""Names that ``on_step`` is called with, in order."""

StepHook = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a fragment."""

    outcome: Literal["committed", "duplicate_plan"]
    """``duplicate_plan``: the same windows were committed before; the earlier ones count."""
    commit_path: str
    """The commit that counts: ours, or the earlier one."""
    plan_id: str
    attempt: int
    write_uuid: str
    windows: int
    tokens: int
    """Rows of features."""
    nbytes: int
    """Feature bytes, without index and padding."""


@dataclass(frozen=True, slots=True)
class _Fragment:
    """A checked fragment on its way into the lake."""

    version: TargetVersion
    head_id: HeadId
    plan_id: str
    writer_id: str
    windows: tuple[Window, ...]
    codec: AuxCodec

    @property
    def layout(self) -> FragmentLayout:
        return self.windows[0].layout

    @property
    def num_rows(self) -> int:
        return sum(window.num_rows for window in self.windows)

    def shard(self, array: str) -> ShardLayout:
        layout = self.layout
        if array == "final" or self.codec is AuxCodec.NONE:
            plain = layout.aux_width if array == "aux" else layout.hidden_size
            return ShardLayout.plan(self.num_rows, plain, layout.dtype)
        width = aux_codec.row_bytes(layout.aux_width, layout.dtype, self.codec)
        return ShardLayout.plan(self.num_rows, width, ByteDtype.UINT8)

    def stored_bytes(self, window: Window) -> int:
        """Feature bytes of a window as stored."""
        return window.num_rows * sum(self.shard(array).row_bytes for array in ARRAYS)

    def result(
        self, name: CommitName, write_uuid: str, outcome: Literal["committed", "duplicate_plan"]
    ) -> CommitResult:
        nbytes = sum(self.stored_bytes(window) for window in self.windows)
        return CommitResult(
            outcome,
            name.path,
            self.plan_id,
            name.attempt,
            write_uuid,
            len(self.windows),
            self.num_rows,
            nbytes,
        )


def plan_digest(
    target_id: str,
    version: TargetVersion,
    source_ids: Sequence[str],
    sampling: Mapping[str, Any],
    layout: FragmentLayout,
) -> str:
    """Name what is collected, not who collects it: retries of one plan get one id (32 hex digits).

    ``source_ids`` are the samples or requests of the fragment in order, ``sampling`` the JSON
    form of the sampling policy.
    """
    body = {
        "target_id": target_id,
        "version": version.number,
        "source_ids": list(source_ids),
        "sampling": dict(sampling),
        "layout": {**asdict(layout), "dtype": layout.dtype.value},
    }
    return hashlib.sha256(canonical_json(body)).hexdigest()[:32]


def write_fragment(
    lake: Lake,
    *,
    version: TargetVersion,
    head_id: HeadId,
    plan_id: str,
    windows: Sequence[Window],
    writer_id: str,
    attempt: int = 0,
    on_step: StepHook | None = None,
    codec: AuxCodec = AuxCodec.NONE,
) -> CommitResult:
    """Commit windows of one target version as one fragment, or find them committed.

    ``attempt`` is where to start; an attempt that retention has fenced off is skipped.
    ``on_step`` is told each finished storage step (:data:`WRITE_STEPS`). ``codec`` is how aux features
    are stored; what it loses is stated in each window's commit row.

    Raises:
        VersionConflictError: windows or head belong to another version.
        LakeContractError: a window is malformed, or windows do not share one layout.
        TargetMismatchError: features do not fit the lake's target.
        PlanConflictError: the plan is committed with other tokens or masks.
        UnknownVersionError: the version is not registered.
    """
    fragment = _checked(lake, _Fragment(version, head_id, plan_id, writer_id, tuple(windows), codec))
    while True:
        name = CommitName(version.number, plan_id, attempt)
        # Asked first, so that running a finished plan again moves no feature bytes.
        result = _judge(lake, fragment, name, own_uuid=None)
        if result == "free":
            result = _write(lake, fragment, name, on_step or _ignore)
        if isinstance(result, CommitResult):
            log.info(
                "fragment %s path=%s windows=%d tokens=%d bytes=%d writer=%s",
                result.outcome, result.commit_path, result.windows, result.tokens, result.nbytes, writer_id,
            )  # fmt: skip
            return result
        # "free" here means that the key was taken at our commit and is empty now: leave it alone too.
        log.warning("%s is fenced off; starting over under the next attempt", name.path)
        attempt += 1


def _ignore(step: str) -> None:
    return None


def _checked(lake: Lake, fragment: _Fragment) -> _Fragment:
    if CommitName.parse(CommitName(0, fragment.plan_id, 0).path) is None:
        raise ValueError(f"a plan id is made of [0-9a-z_-], got {fragment.plan_id!r}")
    if not fragment.windows:
        raise LakeContractError(f"plan {fragment.plan_id} has no window; a fragment holds at least one")
    record = lake.version(fragment.version)
    if record.head_id != fragment.head_id:
        raise VersionConflictError(
            f"{fragment.version} belongs to head {record.head_id}, the fragment was collected with "
            f"{fragment.head_id}. Features and head must come from the same weights: collect with that "
            f"version's checkpoint."
        )
    _check_layout(lake, fragment)
    seen: set[tuple[str, int]] = set()
    for window in fragment.windows:
        if window.meta.version != fragment.version:
            raise VersionConflictError(
                f"sample {window.meta.sample_id!r} is of {window.meta.version}, the fragment of "
                f"{fragment.version}. A fragment never mixes versions: write one per version."
            )
        if window.layout != fragment.layout:
            raise LakeContractError(
                f"sample {window.meta.sample_id!r} has layout {window.layout}, the fragment "
                f"{fragment.layout}. Layer ids and dtype belong to the fragment: write one per layout."
            )
        check_window(window, vocab_size=lake.target.vocab_size)
        key = (window.meta.sample_id, window.meta.start)
        if key in seen:
            raise LakeContractError(
                f"sample {key[0]!r} at position {key[1]} is twice in plan {fragment.plan_id}"
            )
        seen.add(key)
    return fragment


def _check_layout(lake: Lake, fragment: _Fragment) -> None:
    layout, target = fragment.layout, lake.target
    problems = []
    if layout.hidden_size != target.hidden_size:
        problems.append(f"hidden size {layout.hidden_size}, expected {target.hidden_size}")
    if layout.layer_ids[0] < 0 or layout.layer_ids[-1] > target.num_layers:
        problems.append(
            f"layer ids {layout.layer_ids}, expected ids in [0, {target.num_layers}] (blocks applied)"
        )
    if problems:
        raise TargetMismatchError(
            f"features do not fit target {target.target_id!r} of {lake.url}: {'; '.join(problems)}. "
            f"Collect from that target, counting layer ids as decoder blocks applied."
        )


def _write(
    lake: Lake, fragment: _Fragment, name: CommitName, on_step: StepHook
) -> CommitResult | Literal["free", "fenced"]:
    """Write all objects of one attempt, the commit last."""
    write_uuid = uuid.uuid4().hex
    prefix = f"data/{fragment.version.folder}/{fragment.plan_id}.{write_uuid}"
    attributes = _attributes(lake, fragment, name.attempt, write_uuid)
    _create_data(lake, f"{prefix}/{GROUP_FILE}", group_metadata({"draftlake": attributes}))
    on_step(f"data/{GROUP_FILE}")
    encoded = aux_codec.encode_all([w.aux for w in fragment.windows], fragment.layout.dtype, fragment.codec)
    columns: dict[str, Sequence[Any]] = {"aux_error": encoded.errors}
    for array in ARRAYS:
        parts = encoded.rows if array == "aux" else [row_bytes_of(w.final) for w in fragment.windows]
        columns[f"crc32c_{array}"] = [crc32c(part) for part in parts]
        shard = fragment.shard(array)
        _create_data(lake, f"{prefix}/{array}/{ARRAY_FILE}", shard.metadata())
        on_step(f"data/{array}/{ARRAY_FILE}")
        _create_data(lake, f"{prefix}/{array}/{SHARD_KEY}", shard.shard(b"".join(parts)))
        on_step(f"data/{array}/{SHARD_KEY}")
    shard_bytes = {array: fragment.shard(array).object_bytes for array in ARRAYS}
    _create_data(
        lake, f"{prefix}/{TOKENS_FILE}", encode_tokens(fragment.windows, shard_bytes, encoded.scales)
    )
    on_step(f"data/{TOKENS_FILE}")
    rows = _commit_rows(lake, fragment, name, write_uuid, prefix, columns)
    if lake.snapshots.committed(name) is not None:
        # Covered while this was written, and its marker may be gone already: the name is not free.
        return _judge(lake, fragment, name, own_uuid=write_uuid)
    try:
        lake.store.create(name.path, encode_commit(rows))
    except ObjectExistsError:
        return _judge(lake, fragment, name, own_uuid=write_uuid)
    on_step("commit")
    return fragment.result(name, write_uuid, "committed")


def _create_data(lake: Lake, path: str, data: bytes) -> None:
    try:
        lake.store.create(path, data)
    except ObjectExistsError:
        # The path holds a fresh uuid: only our own write whose answer was lost can be there.
        if lake.store.read(path) != data:
            raise CorruptDataError(
                f"{lake.url}/{path} holds other bytes than were just written under a fresh name. "
                f"Does this store honour create-only writes? `draftlake doctor` asks it."
            ) from None


def _committed_rows(lake: Lake, name: CommitName) -> list[dict[str, Any]] | None:
    """What an attempt's commit holds, wherever it is: its marker goes once a snapshot covers it."""
    try:
        return list(lake.read_commit(name.path).to_pylist())
    except FileNotFoundError:
        found = lake.snapshots.committed(name)
        return None if found is None else list(found.to_pylist())


def _judge(
    lake: Lake, fragment: _Fragment, name: CommitName, *, own_uuid: str | None
) -> CommitResult | Literal["free", "fenced"]:
    """What holds this attempt's key: nothing, a fence, our own commit or an equal one; else a conflict."""
    try:
        rows = _committed_rows(lake, name)
        if rows is None:
            return "free"
    except CorruptDataError:
        if is_hidden(lake.store, FragmentName(name.path, None)):
            return "fenced"
        raise
    # What retention gave up or fsck put into quarantine is collected again under the next attempt.
    if not rows or is_hidden(lake.store, FragmentName(name.path, rows[0]["data_prefix"])):
        return "fenced"
    found_uuid = str(rows[0]["write_uuid"])
    if found_uuid == own_uuid:
        return fragment.result(name, found_uuid, "committed")
    try:
        stored = [lake.read_tokens(row) for row in rows]
    except CorruptDataError:
        # Given up so long ago that its data and its tombstone are gone: then the newest snapshot says so.
        if lake.snapshots.dropped(name):
            return "fenced"
        raise
    offered = [TokenRow.of(window) for window in fragment.windows]
    same = (
        len(rows) == len(offered)
        and all(
            (row["sample_id"], row["group_id"]) == (w.meta.sample_id, w.meta.group_id)
            for row, w in zip(rows, fragment.windows, strict=True)
        )
        and all(left.same_tokens(right) for left, right in zip(stored, offered, strict=True))
    )
    if not same:
        raise PlanConflictError(
            f"{lake.url}/{name.path} holds {len(rows)} windows of writer {rows[0]['writer_id']!r} with "
            f"other samples, tokens or masks than the {len(offered)} offered by {fragment.writer_id!r} "
            f"under the same plan. The stored ones stay. A plan id must name its input: derive it with "
            f"plan_digest from the source ids."
        )
    return fragment.result(name, found_uuid, "duplicate_plan")


def _attributes(lake: Lake, fragment: _Fragment, attempt: int, write_uuid: str) -> dict[str, Any]:
    layout = fragment.layout
    return {
        "format_version": FORMAT_VERSION,
        "target_id": lake.target.target_id,
        "target_version": fragment.version.number,
        "head_id": fragment.head_id,
        "plan_id": fragment.plan_id,
        "attempt": attempt,
        "write_uuid": write_uuid,
        "layer_ids": list(layout.layer_ids),
        "dtype": layout.dtype.value,
        "hidden_size": layout.hidden_size,
        "codec": fragment.codec.value,
        "conventions": {
            "layer_id": "number of decoder blocks applied; 0 is the embedding output",
            "aux": "residual stream before any final norm; axis 1 is layer id ascending, then hidden",
            "final": "input of the LM head, after the final norm",
            "rows": "unshifted: row i belongs to the token at the window's start + i",
        },
    }


def _commit_rows(
    lake: Lake,
    fragment: _Fragment,
    name: CommitName,
    write_uuid: str,
    prefix: str,
    columns: Mapping[str, Sequence[Any]],
) -> list[dict[str, Any]]:
    layout, rows, offset = fragment.layout, [], 0
    for index, window in enumerate(fragment.windows):
        rows.append({
            **meta_fields(window.meta),
            "schema_version": FORMAT_VERSION,
            "target_id": lake.target.target_id,
            "head_id": fragment.head_id,
            "plan_id": fragment.plan_id,
            "attempt": name.attempt,
            "write_uuid": write_uuid,
            "writer_id": fragment.writer_id,
            "data_prefix": prefix,
            "window_index": index,
            "num_rows": window.num_rows,
            "num_sampled": int(np.count_nonzero(window.sampled_mask)),
            "row_offset": offset,
            "layer_ids": list(layout.layer_ids),
            "dtype": layout.dtype.value,
            "hidden_size": layout.hidden_size,
            "codec": fragment.codec.value,
            "nbytes": fragment.stored_bytes(window),
            "crc32c_tokens": TokenRow.of(window).crc32c,
            **{column: values[index] for column, values in columns.items()},
        })  # fmt: skip
        offset += window.num_rows
    return rows

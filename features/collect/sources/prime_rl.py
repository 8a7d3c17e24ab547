"""prime-rl: the traces that its orchestrator appends, and the trainer's token export.

A trace is a tree of messages. Each leaf is one sequence, the messages from the root joined; leaves
share prefixes, so a token that was sampled once is marked as sampled in the first leaf only.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from features.collect.rollout import Reason, logprob_value
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.files import SourceFile
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, VersionFacts, from_bounds

log = logging.getLogger(__name__)

_EXPORT_STEP = r"token_exports/step_(\d+)/"
_ALL, _EFFECTIVE = "/all/traces.jsonl", "/effective/traces.jsonl"
_MEDIA = {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"}


def without_copies(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Without the ``effective`` traces whose ``all`` is there too: every episode of the former is in the latter."""
    urls = {file.url for file in files}
    kept = [f for f in files if not (f.url.endswith(_EFFECTIVE) and f.url.replace(_EFFECTIVE, _ALL) in urls)]
    if len(kept) < len(files):
        log.warning(
            "%d effective/traces.jsonl left out: all/traces.jsonl holds their episodes",
            len(files) - len(kept),
        )
    return kept


def is_traces(record: Record) -> bool:
    """Whether a record is an episode with its traces."""
    return isinstance(record.get("traces"), list) and "id" in record


def is_token_export(record: Record) -> bool:
    """Whether a record is a row of the trainer's token export."""
    return {"token_ids", "inference_logprobs", "loss_mask", "position_ids"} <= record.keys()


def read_traces(record: Record, row: Row) -> Iterator[Item]:
    """A sequence per leaf of each trace of an episode."""
    work = _at(record, "run", "work")
    facts, step = _policy(work), records.integer("run.work.step", work.get("step"))
    common: dict[str, Any] = {
        "source_group": records.name_of(_at(record, "group").get("id")),
        "session_id": records.name_of(record.get("id")),
        "domain": records.name_of(record.get("env")),
        "file_step": step,
    }
    trained = "/train/effective/" in f"/{row.partition.url}"
    branch = 0
    for number, value in enumerate(records.items("traces", record.get("traces"))):
        trace = records.mapping(f"traces[{number}]", value)
        nodes = _nodes(trace.get("nodes"))
        taken: set[int] = set()
        for path in _paths(nodes):
            try:
                parts = _joined([nodes[i] for i in path], new=[i not in taken for i in path])
                taken.update(path)
                loss = parts["sampled"] if trained else None
                yield row.sequence(
                    **parts, loss=loss, logprob_kind="engine_processed", facts=facts, branch=branch,
                    reward=_reward(trace.get("rewards")), **common,
                )  # fmt: skip
            except RecordError as error:
                yield error
            branch += 1


def read_token_export(record: Record, row: Row) -> Iterator[Item]:
    """One sequence as the trainer saw it, cut at its sequence length; no version is recorded."""
    ids = records.token_ids("token_ids", record.get("token_ids"))
    loss = records.mask("loss_mask", record.get("loss_mask"))
    logprobs = records.numbers("inference_logprobs", record.get("inference_logprobs"))
    records.require_length("loss_mask", loss, len(ids))
    records.require_length("inference_logprobs", logprobs, len(ids), logprobs=True)
    sampled = [
        counts or logprob_value(value) is not None
        for counts, value in zip(loss, logprobs or [None] * len(ids), strict=True)
    ]
    trainer = records.numbers("trainer_logprobs", record.get("trainer_logprobs"))
    yield row.sequence(
        token_ids=ids,
        prompt_length=records.first_sampled(sampled),
        sampled=sampled,
        loss=loss,
        logprobs=logprobs,
        logprob_kind="engine_processed",
        # Entry 0 is a filler: nothing predicts the first token.
        trainer_logprobs=None if trainer is None else (None, *trainer[1:]),
        advantages=records.numbers("advantages", record.get("advantages")),
        domain=records.text("env_name", record.get("env_name")) or None,
        file_step=row.step_in_name(_EXPORT_STEP),
    )


def _at(record: Record, *names: str) -> Record:
    """The object at a path; an empty one where it is absent, which means defaults."""
    for name in names:
        value = record.get(name)
        record = {} if value is None else records.mapping(name, value)
    return record


def _policy(work: Record) -> VersionFacts:
    policy = _at(work, "policy")
    start, end = (records.integer(f"policy.{k}", policy.get(k)) for k in ("start", "end"))
    return UNKNOWN if start is None and end is None else from_bounds(start, end)


def _nodes(value: object) -> list[Record]:
    nodes = [records.mapping(f"nodes[{i}]", node) for i, node in enumerate(records.items("nodes", value))]
    for i, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < i):
            raise records.bad(f"nodes[{i}].parent", "an earlier node", parent)
    return nodes


def _paths(nodes: Sequence[Record]) -> Iterator[list[int]]:
    """Node numbers from the root to each leaf, leaves in file order."""
    parents = {node.get("parent") for node in nodes}
    for leaf in (i for i in range(len(nodes)) if i not in parents):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].get("parent")
        yield path[::-1]


def _joined(path: Sequence[Record], new: Sequence[bool]) -> dict[str, Any]:
    """Tokens, masks and logprobs of a path; sampled tokens of nodes that are not ``new`` do not count."""
    ids: list[int] = []
    sampled: list[bool] = []
    counted: list[bool] = []
    values: list[float | None] = []
    for node, fresh in zip(path, new, strict=True):
        part, mask, logprobs = _node_tokens(node)
        ids.extend(part)
        sampled.extend(mask)
        counted.extend(flag and fresh for flag in mask)
        values.extend(value if fresh else None for value in logprobs)
    return {
        "token_ids": ids, "sampled": counted, "prompt_length": records.first_sampled(sampled),
        "logprobs": values, "multimodal": any(_has_media(node.get("message")) for node in path) or None,
    }  # fmt: skip


def _node_tokens(node: Record) -> tuple[tuple[int, ...], tuple[bool, ...], list[float | None]]:
    """Ids of a node's own message, which of them were sampled, and their logprobs (held for those only)."""
    ids = records.token_ids("token_ids", node.get("token_ids") or None, remedy="a relayed turn has no ids")
    given = node.get("mask")
    if given is None and node.get("sampled"):
        raise RecordError(
            Reason.BAD_FIELD, "a sampled node has no mask: which tokens were sampled is unknown"
        )
    mask = (False,) * len(ids) if given is None else records.mask("mask", given)
    records.require_length("mask", mask, len(ids))
    held = records.numbers("logprobs", node.get("logprobs") or None)
    records.require_length("logprobs", held, sum(mask), logprobs=True)
    entries = iter(held if held is not None else [None] * sum(mask))
    return ids, mask, [next(entries) if flag else None for flag in mask]


def _reward(value: object) -> float | None:
    """The weighted sum of a trace's rewards."""
    if not value:
        return None
    total = 0.0
    for name, part in records.mapping("rewards", value).items():
        part = records.mapping(f"rewards.{name}", part)
        score = records.number(f"rewards.{name}.score", part.get("score"))
        weight = records.number(f"rewards.{name}.weight", part.get("weight", 1.0))
        if score is None or weight is None:
            return None
        total += score * weight
    return total


def _has_media(message: object) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        isinstance(c, Mapping) and c.get("type") in _MEDIA for c in content
    )

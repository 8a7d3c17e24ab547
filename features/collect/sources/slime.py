"""slime and vime debug rollouts, converted by the script in docs/rollouts.md: one sample per line."""

from collections.abc import Iterator

from features.collect.rollout import Reason, logprob_value
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, VersionFacts, from_labels, numeric_label

_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error"}
_LABEL = numeric_label(-1)
"""The engine's counter is raised by the push of the initial weights: label ``v + 1`` is version ``v``."""


def is_slime(record: Record) -> bool:
    """Whether a record is a converted sample."""
    return {"tokens", "response_length", "file_step", "weight_versions"} <= record.keys()


def read(record: Record, row: Row) -> Iterator[Item]:
    """One sequence; masks and logprobs cover the response only, and the version is a recorded label or null.

    A token with loss mask 0 was sampled when it has a logprob (off-policy masking), and is tool output
    when it has none.
    """
    ids = records.token_ids("tokens", record.get("tokens"))
    length = records.integer("response_length", record.get("response_length"))
    if length is None or length > len(ids):
        raise RecordError(Reason.LENGTH_MISMATCH, f"response_length is {length} for {len(ids)} tokens")
    prompt = len(ids) - length
    given = record.get("loss_mask")
    trained = (True,) * length if given is None else records.mask("loss_mask", given)
    logprobs = records.numbers("rollout_log_probs", record.get("rollout_log_probs"))
    records.require_length("loss_mask", trained, length)
    records.require_length("rollout_log_probs", logprobs, length, logprobs=True)
    values = logprobs or (None,) * length
    sampled = [t or logprob_value(v) is not None for t, v in zip(trained, values, strict=True)]
    removed = record.get("remove_sample") is True
    reward = record.get("reward")
    yield row.sequence(
        token_ids=ids,
        prompt_length=prompt,
        sampled=records.on_response(prompt, sampled, False) or (),
        loss=records.on_response(prompt, [t and not removed for t in trained], False),
        logprobs=records.on_response(prompt, logprobs, None),
        facts=_facts(record),
        # A mapping names several rewards, and no one of them is the sample's.
        reward=None if isinstance(reward, dict) else records.number("reward", reward),
        finish=_FINISH.get(str(record.get("status"))),
        source_group=records.name_of(record.get("group_index")),
        session_id=records.name_of(record.get("session_id")),
        file_step=records.integer("file_step", record.get("file_step")),
    )


def _facts(record: Record) -> VersionFacts:
    """One label per engine call, without places."""
    value = record.get("weight_versions")
    labels = [] if value is None else records.items("weight_versions", value)
    names = [records.name_of(label) for label in labels]
    return from_labels([name or "" for name in names], _LABEL) if names else UNKNOWN

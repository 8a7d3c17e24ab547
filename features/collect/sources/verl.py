"""verl ``tq_batch.pt`` and ``gen_batch.dp``, converted by the script in docs/rollouts.md: one row per line."""

from collections.abc import Iterator

from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Padding, Row
from features.collect.sources.versions import UNKNOWN, VersionFacts, from_bounds, inferred


def is_verl(record: Record) -> bool:
    """Whether a record is a converted row."""
    return {"prompts", "responses", "response_mask"} <= record.keys()


def read(record: Record, row: Row) -> Iterator[Item]:
    """One sequence. ``attention_mask`` over prompt and response, where there is one, says what is padding.

    ``response_mask`` is 1 for sampled tokens and 0 for tool output. The tags hold the first and last
    version of the trajectory; a dump that was replayed from a cache has false ones.
    """
    if record.get("is_padding") is True or record.get("pad_row") is True:
        yield Padding.ROW
        return
    prompt = records.token_ids("prompts", record.get("prompts"))
    response = records.token_ids("responses", record.get("responses"))
    mask = records.mask("response_mask", record.get("response_mask"))
    logprobs = records.numbers("rollout_log_probs", record.get("rollout_log_probs"))
    records.require_length("response_mask", mask, len(response))
    records.require_length("rollout_log_probs", logprobs, len(response), logprobs=True)
    real = _real(record, len(prompt), len(response))
    kept_prompt = [t for t, keep in zip(prompt, real, strict=False) if keep]
    kept = [i for i, keep in enumerate(real[len(prompt) :]) if keep]
    sampled = [False] * len(kept_prompt) + [mask[i] for i in kept]
    values = None if logprobs is None else [logprobs[i] for i in kept]
    scores = records.numbers("rm_scores", record.get("rm_scores"))
    step = records.integer("global_steps", record.get("global_steps"))
    yield row.sequence(
        token_ids=kept_prompt + [response[i] for i in kept],
        prompt_length=len(kept_prompt),
        sampled=sampled,
        loss=sampled,
        logprobs=records.on_response(len(kept_prompt), values, None),
        logprob_kind="engine_processed",
        facts=_facts(record),
        inferred=UNKNOWN if step is None else inferred(step - int(not row.options.evaluation)),
        reward=None if scores is None else sum(v or 0.0 for v in scores),
        source_group=_group(record),
        file_step=step,
    )


def _real(record: Record, prompt: int, response: int) -> tuple[bool, ...]:
    """Which tokens are no padding: from a mask, never by looking for the pad id."""
    given = record.get("attention_mask")
    if given is None:
        return (True,) * (prompt + response)
    real = records.mask("attention_mask", given)
    records.require_length("attention_mask", real, prompt + response)
    return real


def _facts(record: Record) -> VersionFacts:
    """Labels are ``global_steps`` after each update: label ``v`` is version ``v``."""
    low, high = (records.integer(name, record.get(name)) for name in ("min_global_steps", "max_global_steps"))
    return UNKNOWN if low is None and high is None else from_bounds(low, high)


def _group(record: Record) -> str | None:
    """The prompt's uid, which a key continues with session and output."""
    uid = records.name_of(record.get("uid"))
    key = records.name_of(record.get("key"))
    return uid if uid is not None or key is None else key.rsplit("_", 2)[0]

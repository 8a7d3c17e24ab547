"""Sources that hold text and no token ids: verl's JSONL, TRL's completions, SkyRL's evaluations.

Tokenising text again need not give what the engine saw (special tokens are gone, several splits spell
one text), so it happens only when the user allows it, and the windows stay unverified.
"""

import importlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from features.collect.rollout import Reason, Rollout
from features.collect.rollouts import RecordError
from features.collect.sources import records
from features.collect.sources.records import Record
from features.collect.sources.row import Item, Row
from features.collect.sources.versions import UNKNOWN, inferred
from features.errors import InputError

_EVAL_STEP = r"global_step_(\d+)_evals/"
_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


def is_verl_text(record: Record) -> bool:
    """Whether a record is a line of verl's ``rollout_data_dir``."""
    return {"input", "output", "score", "step"} <= record.keys()


def is_trl(record: Record) -> bool:
    """Whether a record is a row of TRL's completions."""
    return {"step", "prompt", "completion", "advantage"} <= record.keys()


def is_skyrl_eval(record: Record) -> bool:
    """Whether a record is a line of SkyRL's dumped evaluations."""
    return {"input_prompt", "output_response", "stop_reason"} <= record.keys()


def read_verl(record: Record, row: Row) -> Iterator[Item]:
    """One sequence; step ``N`` was sampled by version ``N - 1``, in an evaluation by ``N``."""
    step = records.integer("step", record.get("step"))
    uid = records.name_of(record.get("uid"))
    yield _sequence(
        record, row, "input", "output", step, 0 if row.options.evaluation else -1,
        reward=records.number("score", record.get("score")),
        source_group=None if uid is None else uid.rsplit("_", 2)[0],
    )  # fmt: skip


def read_trl(record: Record, row: Row) -> Iterator[Item]:
    """One sequence; step ``N`` was sampled by version ``N - 1`` when each step generates anew."""
    yield _sequence(record, row, "prompt", "completion", records.integer("step", record.get("step")), -1)


def read_skyrl_eval(record: Record, row: Row) -> Iterator[Item]:
    """One sequence of the evaluation of version ``N``."""
    yield _sequence(
        record, row, "input_prompt", "output_response", row.step_in_name(_EVAL_STEP), 0,
        reward=_score(record.get("score")), finish=_FINISH.get(str(record.get("stop_reason"))),
        domain=records.name_of(record.get("data_source")),
    )  # fmt: skip


def _sequence(
    record: Record,
    row: Row,
    prompt_name: str,
    response_name: str,
    step: int | None,
    behind: int,
    **described: Any,
) -> Rollout:
    if not row.options.allow_retokenise:
        raise RecordError(
            Reason.TEXT_ONLY,
            f"{row.partition.format} holds text and no token ids: give --allow-retokenise to tokenise it again; its "
            "windows stay unverified",
        )
    tokenize = tokenizer(row.options.tokenizer)
    prompt, response = (tokenize(_text(record, name)) for name in (prompt_name, response_name))
    sampled = [False] * len(prompt) + [True] * len(response)
    return row.sequence(
        token_ids=prompt + response, prompt_length=len(prompt), sampled=sampled, token_source="retokenised",
        inferred=UNKNOWN if step is None else inferred(step + behind), file_step=step, **described,
    )  # fmt: skip


def _text(record: Record, name: str) -> str:
    value = records.text(name, record.get(name))
    if value is None:
        raise records.bad(name, "text", None)
    return value


def _score(value: object) -> float | None:
    """A number; a list of per-token scores has no single one."""
    return None if isinstance(value, list) else records.number("score", value)


def tokenizer(folder: str | None) -> Any:
    """Function from text to token ids, adding no special tokens.

    Raises:
        InputError: no folder is given, it has no ``tokenizer.json``, or the package is missing.
    """
    if folder is None:
        raise InputError(
            "retokenising needs the target's tokenizer: give the folder that holds its tokenizer.json"
        )
    return _loaded(str(Path(folder) / "tokenizer.json"))


@lru_cache(maxsize=4)
def _loaded(path: str) -> Any:
    if not Path(path).is_file():
        raise InputError(f"no tokenizer at {path!r}: give the folder of the target that sampled the text")
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise InputError(
            f"retokenising needs tokenizers ({error}): pip install 'draftlake[train]'"
        ) from error
    loaded = library.Tokenizer.from_file(path)
    loaded.no_truncation()
    loaded.no_padding()
    return lambda text: tuple(loaded.encode(text, add_special_tokens=False).ids)

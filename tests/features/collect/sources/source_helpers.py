"""What the tests of sources share: write lines, read them through the public functions."""

import json
from pathlib import Path
from typing import Any

from features.collect.rollouts import Rollout
from features.collect.sources import SourceCounts, SourceOptions, open_source, read_partition
from features.quarantine import Refusal

GENERATE = {
    "request_id": "q", "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0, "finish_reason": "stop", "token_ids": [3, 4],
            "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -0.25}]},
            "weight_versions": [{"version": "5", "start": 0, "end": 2}],
        }
    ],
}  # fmt: skip
"""A response of vLLM that is whole."""


def response(first: int = 3, **choice: Any) -> dict[str, Any]:
    """Such a response, whose first sampled token is ``first``."""
    logprobs = {"content": [{"token_id": first, "logprob": -0.5}, {"token_id": 4, "logprob": -0.25}]}
    base = GENERATE["choices"][0] | {"token_ids": [first, 4], "logprobs": logprobs}  # type: ignore[index]
    return GENERATE | {"choices": [base | choice]}


def read_file(
    path: Path | str, format: str | None = None, **statements: Any
) -> tuple[list[Rollout | Refusal], SourceCounts]:
    """Everything behind a url, through all of its partitions; every line must be accounted for."""
    options = SourceOptions(**statements)
    total, items = SourceCounts(), []
    for partition in open_source([str(path)], format=format, options=options):
        counts = SourceCounts()
        items.extend(read_partition(partition, options, counts))
        assert counts.accounted, counts
        for name in SourceCounts.__dataclass_fields__:
            setattr(total, name, getattr(total, name) + getattr(counts, name))
    return items, total


def read_records(
    path: Path, *records: Any, format: str | None = None, **statements: Any
) -> list[Rollout | Refusal]:
    """What records become when they stand in a file, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return read_file(path, format, **statements)[0]


def rollout(items: list[Rollout | Refusal], at: int = 0) -> Rollout:
    item = items[at]
    assert isinstance(item, Rollout), item
    return item


def reasons(items: list[Rollout | Refusal]) -> list[str | None]:
    """The reason of each refusal, None for a rollout."""
    return [item.reason if isinstance(item, Refusal) else None for item in items]

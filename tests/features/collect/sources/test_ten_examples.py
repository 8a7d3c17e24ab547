"""The ten records that say what each framework's rows mean, from real files under their real names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from features.collect.rollouts import Rollout
from features.collect.sources import SourceCounts, SourceOptions, open_source, read_partition
from features.errors import InputError
from features.quarantine import Refusal

EXAMPLES = [
    json.loads(line) for line in (Path(__file__).parent / "ten_examples.jsonl").read_text().splitlines()
]
FORMATS = {
    "nemo": "nemo-rl", "verl_text": "verl-text", "verl_tq": "verl", "slime": "slime", "vime": "vime",
    "prime": "prime-rl", "skyrl": "skyrl", "vllm_generate": "vllm-generate",
}  # fmt: skip
PICKLES = (".pt", ".pkl")


def converted(name: str) -> str:
    """The name that the conversion gives a pickle."""
    path = Path(name)
    return str(path.with_suffix(".jsonl")) if path.suffix in PICKLES else name


def read_example(
    root: Path, example: dict[str, Any], *, named: bool, **options: Any
) -> Sequence[Rollout | Refusal]:
    path = root / converted(example["file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(example["rec"]) + "\n")
    asynchronous = example.get("opt", {}).get("async", False)
    statements = SourceOptions(**{"assume_synchronous": not asynchronous} | options)
    (partition,) = open_source(
        [str(path)], format=FORMATS[example["src"]] if named else None, options=statements
    )
    assert partition.format == FORMATS[example["src"]] or (partition.format, example["src"]) == (
        "slime",
        "vime",
    )
    counts = SourceCounts()
    items = list(read_partition(partition, statements, counts))
    assert counts.accounted
    return items


def as_expected(rollout: Rollout, wanted: dict[str, Any]) -> dict[str, Any]:
    """The fields that an example names, in its words."""
    masks = {"sampled": rollout.sampled_mask, "loss": rollout.loss_mask}
    low, high = rollout.version_min, rollout.version_max
    spans = [[s.label, s.start, s.stop] for s in rollout.version_spans or ()]
    found: dict[str, Any] = {
        "token_ids": list(rollout.token_ids), "prompt_len": rollout.prompt_length, "version": rollout.version,
        "logprob": None if rollout.logprobs is None else list(rollout.logprobs),
        "span": None if low is None else [low, high], "spans": spans or None,
        **{name: None if mask is None else [int(m) for m in mask] for name, mask in masks.items()},
    }  # fmt: skip
    return {name: found[name] for name in wanted}


@pytest.mark.parametrize("named", [False, True], ids=["told", "named"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['case']}-{e['src']}")
def test_an_example_gives_what_it_expects(tmp_path: Path, example: dict[str, Any], named: bool) -> None:
    items = read_example(tmp_path, example, named=named)
    if example["expect"] == "refused":
        assert [item.reason for item in items if isinstance(item, Refusal)] == ["text_only"]
        return
    rollouts = [item for item in items if isinstance(item, Rollout)]
    assert [as_expected(r, e) for r, e in zip(rollouts, example["expect"], strict=True)] == example["expect"]
    assert len(rollouts) == len(items)


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if Path(e["file"]).suffix in PICKLES], ids=lambda e: e["case"]
)
def test_under_its_own_name_a_pickle_is_not_opened(tmp_path: Path, example: dict[str, Any]) -> None:
    path = tmp_path / example["file"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02}q\x00.")
    for url in (path, tmp_path):
        with pytest.raises(InputError, match=r"a pickle is never opened.*Convert it.*docs/rollouts.md"):
            open_source([str(url)], format=None, options=SourceOptions())


def test_text_with_the_flag_has_an_inferred_version_and_never_verifies(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (example,) = [e for e in EXAMPLES if e["case"] == 3]
    options = {"allow_retokenise": True, "tokenizer": str(tokenizer_folder)}
    (item,) = read_example(tmp_path, example, named=False, **options)
    assert isinstance(item, Rollout)
    assert (item.version, item.version_source) == (11, "inferred")
    assert (item.token_source, item.may_verify, item.logprobs) == ("retokenised", False, None)
    assert 0 < item.prompt_length < len(item.token_ids)


@pytest.mark.parametrize("case", [1, 9])
def test_a_version_is_inferred_only_when_the_user_says_the_run_was_synchronous(
    tmp_path: Path, case: int
) -> None:
    (example,) = [e for e in EXAMPLES if e["case"] == case]
    (item,) = read_example(tmp_path, example, named=True, assume_synchronous=False)
    assert isinstance(item, Rollout)
    assert (item.version, item.version_source) == (None, "unknown")

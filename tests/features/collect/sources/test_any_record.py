"""Whatever stands in a record, its reader answers: nothing is raised, and every line is accounted for."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_helpers import read_file, response

from features.collect.rollouts import Rollout, rollout_problem
from features.collect.sources.formats import EMPTY, FORMATS
from features.quarantine import Refusal

EXAMPLES = [
    json.loads(line) for line in (Path(__file__).parent / "ten_examples.jsonl").read_text().splitlines()
]
RECORDS: dict[str, dict[str, Any]] = {
    "nemo-rl": EXAMPLES[0]["rec"], "verl-text": EXAMPLES[2]["rec"], "verl": EXAMPLES[3]["rec"],
    "slime": EXAMPLES[4]["rec"], "vime": EXAMPLES[6]["rec"], "prime-rl": EXAMPLES[7]["rec"],
    "skyrl": EXAMPLES[8]["rec"], "vllm-generate": EXAMPLES[9]["rec"],
    "vllm-chat": response() | {"object": "chat.completion"},
    "vllm-completions": response(logprobs={"token_logprobs": [-0.5, -0.25]}) | {"object": "text_completion"},
    "prime-rl-tokens": {
        "token_ids": [1, 2], "position_ids": [0, 1], "loss_mask": [False, True], "inference_logprobs": [0.0, -0.5],
        "trainer_logprobs": [0.0, -0.5], "advantages": [0.0, 1.0], "env_name": "e",
    },
    "trl": {"step": 5, "prompt": "user say hi", "completion": "hello", "advantage": 0.5},
    "skyrl-evals": {"input_prompt": "a", "output_response": "b", "stop_reason": "stop", "score": 1.0},
    "draftlake-rollout-1": {
        "sample_id": "a", "group_id": "g", "token_ids": [1, 2], "prompt_length": 1, "sampled_mask": [False, True],
        "version": 3, "version_spans": [["3", 1, 2]], "logprobs": [None, -1.0], "logprob_kind": "engine_raw",
    },
    "draftlake-normalised": {
        "row_id": "r", "sample_id": "a", "source": "s", "source_file": "f", "source_row": 1, "split_group": "g",
        "branch": 0, "token_ids": [1, 2], "prompt_len": 1, "sampled_mask": [False, True], "token_source": "ids",
        "version_source": "spans", "version_spans": [{"label": "3", "start": 1, "end": 2}], "verify": "unverified",
        "pad_row": False, "multimodal": False,
    },
    "mapping": {"ids": [1, 2], "n": 1, "m": [0, 1], "v": 3, "name": "a", "lp": [None, -1.0]},
}  # fmt: skip
COLUMNS = {
    "token_ids": "ids", "prompt_length": "n", "sampled_mask": "m", "version": "v", "domain": "name", "logprobs": "lp",
}  # fmt: skip

VALUE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from([10**30, 2**31, 1e308, 0.5, -9999.0]),
        st.floats(), st.text(max_size=3), st.sampled_from(["\ud800", "token_id:3", "9" * 5000]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=4,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A format, and its record twice with something else in up to two places."""
    name = draw(st.sampled_from(sorted(RECORDS)))
    record = copy.deepcopy(RECORDS[name])
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(places(record)[1:] or [()]))
        holder: Any = record
        for key in place[:-1]:
            holder = holder[key]
        if place:
            holder[place[-1]] = draw(VALUE)
    return name, [record, RECORDS[name]]


def test_every_format_is_fuzzed() -> None:
    assert set(RECORDS) == set(FORMATS) - {EMPTY}


@pytest.mark.parametrize(
    "statements", [{}, {"user_version": 3, "assume_synchronous": True, "allow_retokenise": True}]
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=spoilt())
def test_a_spoilt_record_costs_itself_only(
    tmp_path: Path, tokenizer_folder: Path, statements: dict[str, Any], case: tuple[str, list[dict[str, Any]]]
) -> None:
    name, records = case
    path = tmp_path / "global_step_3_evals" / "global_step_5_training_input.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = COLUMNS if name == "mapping" else None
    items, counts = read_file(path, name, columns=columns, tokenizer=str(tokenizer_folder), **statements)
    assert counts.lines == 2
    for item in items:
        if isinstance(item, Refusal):
            json.dumps(item.sample, default=str)
            continue
        assert isinstance(item, Rollout)
        assert rollout_problem(item) is None
        "".join([item.sample_id, item.group_id, item.domain or "", item.version_label or ""]).encode("utf-8")
        assert item.may_verify or item.version_source == "user" or item.token_source == "retokenised"
        assert item.version_source != "inferred" or statements

"""What each framework's rows become beyond the ten examples: traps, refusals and counts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from source_helpers import GENERATE, read_file, read_records, reasons, response, rollout

from features.collect.rollouts import Rollout
from features.errors import InputError

EXAMPLES = {
    e["case"]: e["rec"]
    for e in map(json.loads, (Path(__file__).parent / "ten_examples.jsonl").read_text().splitlines())
}


def changed(case: int, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(EXAMPLES[case]) | changes


# vLLM


def chat(**choice: Any) -> dict[str, Any]:
    content = [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -9999.0, "bytes": [98]},
    ]
    base = {"index": 0, "finish_reason": "tool_calls", "token_ids": [3, 4], "logprobs": {"content": content}}
    return {"id": "c", "object": "chat.completion", "prompt_token_ids": [1, 2], "choices": [base | choice]}


def completion(**choice: Any) -> dict[str, Any]:
    base = {
        "index": 0, "finish_reason": "length", "prompt_token_ids": [1, 2], "token_ids": [3, 4],
        "logprobs": {"token_logprobs": [-0.5, None]},
    }  # fmt: skip
    return {"id": "c", "object": "text_completion", "choices": [base | choice]}


def test_chat_and_completions_are_told_and_have_no_version(tmp_path: Path) -> None:
    first = rollout(read_records(tmp_path / "chat.jsonl", chat()))
    other = rollout(read_records(tmp_path / "completions.jsonl", completion()))
    assert (first.source, other.source) == ("vllm-chat", "vllm-completions")
    for item in (first, other):
        assert (item.token_ids, item.prompt_length) == ((1, 2, 3, 4), 2)
        assert (item.logprobs, item.logprob_kind) == ((None, None, -0.5, None), "engine_raw")
        assert (item.version, item.version_source) == (None, "unknown")
    assert (first.finish, other.finish) == ("stop", "length")


def test_token_id_strings_stand_in_for_hidden_ids(tmp_path: Path) -> None:
    content = [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -0.25}]
    item = rollout(read_records(tmp_path / "c.jsonl", chat(token_ids=None, logprobs={"content": content})))
    assert item.token_ids == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (chat(token_ids=None), "token_ids_missing"),
        (chat() | {"prompt_token_ids": None}, "token_ids_missing"),
        (completion(token_ids=[3]), "logprob_mismatch"),
        (completion(token_ids=[3, -4]), "bad_field"),
        (completion(token_ids=[3, None]), "bad_field"),
        (chat(logprobs={"content": [{"token": "token_id:9", "logprob": -1.0}] * 2}), "logprob_mismatch"),
        (chat(delta={}), "bad_field"),
        (chat() | {"choices": []}, "bad_field"),
        (chat() | {"choices": None}, "bad_field"),
    ],
)
def test_a_response_that_does_not_hold_together_is_refused(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    assert reasons(read_records(tmp_path / "c.jsonl", record)) == [reason]


def test_echoed_prompt_logprobs_are_not_the_responses(tmp_path: Path) -> None:
    record = completion(logprobs={"token_logprobs": [None, -7.0, -0.5, -0.25]})
    assert rollout(read_records(tmp_path / "c.jsonl", record)).logprobs == (None, None, -0.5, -0.25)


def test_each_choice_is_a_sequence_and_a_bad_one_costs_itself(tmp_path: Path) -> None:
    good = GENERATE["choices"][0]  # type: ignore[index]
    record = GENERATE | {
        "choices": [good, good | {"token_ids": [9]}, good | {"token_ids": [4, 4], "logprobs": None}]
    }
    items, counts = [], None
    (tmp_path / "g.jsonl").write_text(json.dumps(record))
    items, counts = read_file(tmp_path / "g.jsonl")
    assert reasons(items) == [None, "logprob_mismatch", None]
    assert (counts.lines, counts.more_records, counts.rollouts, counts.refused) == (1, 2, 2, 1)
    assert rollout(items, 2).logprobs is None


def test_an_entry_without_token_id_refuses_the_sequence(tmp_path: Path) -> None:
    record = response(logprobs={"content": [{"token_id": 3, "logprob": -0.5}, {"logprob": -0.25}]})
    items = read_records(tmp_path / "g.jsonl", record, response(8))
    assert reasons(items) == ["logprob_mismatch", None]
    assert "names no token_id" in items[0].detail  # type: ignore[union-attr]


# NeMo-RL


def nemo(**changes: Any) -> dict[str, Any]:
    return changed(1, **changes)


def test_nemo_keeps_engine_and_trainer_logprobs_apart(tmp_path: Path) -> None:
    item = rollout(read_records(tmp_path / "train_data_step8.jsonl.gz", nemo(), format="nemo-rl"))
    assert item.trainer_logprobs == (None, -3.0, -0.51, -0.26, -0.12)
    assert (item.reward, item.file_step, item.logprob_kind) == (1.0, 8, "engine_unknown")


def test_nemo_with_dynamic_sampling_takes_the_filtered_reward_or_none(tmp_path: Path) -> None:
    late = nemo(rewards=[], filtered_rewards=[])
    first, second = read_records(tmp_path / "train_data_step8.jsonl", nemo(filtered_rewards=[0.25]), late)
    assert rollout([first]).reward == 0.25
    assert rollout(read_records(tmp_path / "one.jsonl", late)).reward is None
    del second


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input_lengths": [9]}, "length_mismatch"),
        ({"input_lengths": []}, "length_mismatch"),
        ({"token_loss_mask": [[0, 1]]}, "length_mismatch"),
        ({"generation_logprobs": [[-0.5]]}, "logprob_mismatch"),
        ({"token_ids": [[1], [2]]}, "bad_field"),
        ({"token_ids": []}, "token_ids_missing"),
        ({"token_loss_mask": [[0, 0, 1, 1, 2, 0, 0, 0]]}, "bad_field"),
    ],
)
def test_a_nemo_row_that_does_not_hold_together_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(read_records(tmp_path / "train_data_step8.jsonl", nemo(**changes))) == [reason]


# prime-rl


def episode(*nodes: dict[str, Any], start: int | None = 7, end: int | None = 7) -> dict[str, Any]:
    record = changed(8)
    record["run"]["work"]["policy"] = {"start": start, "end": end}
    return record | {"traces": [{"nodes": list(nodes), "rewards": {}}]}


def sampled(parent: int, *ids: int, **changes: Any) -> dict[str, Any]:
    base = {"parent": parent, "sampled": True, "token_ids": list(ids), "mask": [True] * len(ids)}
    return base | {"logprobs": [-0.5] * len(ids)} | changes


ROOT = {"token_ids": [11, 12], "mask": [False, False]}


def test_prime_policy_that_stood_still_is_a_version(tmp_path: Path) -> None:
    item = rollout(read_records(tmp_path / "traces.jsonl", episode(ROOT, sampled(0, 13, 14))))
    assert (item.version, item.version_source, item.source_group) == (7, "min_max", "g1")
    assert (item.file_step, item.logprob_kind) == (9, "engine_processed")
    frozen = rollout(read_records(tmp_path / "f.jsonl", episode(ROOT, sampled(0, 13), start=None, end=None)))
    assert frozen.version is None


def test_prime_tokens_that_leaves_share_count_once(tmp_path: Path) -> None:
    tool = {"parent": 1, "token_ids": [90], "mask": [False]}
    record = episode(ROOT, sampled(0, 13), tool, sampled(2, 21), sampled(2, 22))
    one, two = read_records(tmp_path / "traces.jsonl", record)
    assert rollout([one]).token_ids == (11, 12, 13, 90, 21)
    assert rollout([one]).sampled_mask == (False, False, True, False, True)
    assert rollout([two]).token_ids == (11, 12, 13, 90, 22)
    assert rollout([two]).sampled_mask == (False, False, False, False, True)
    assert (rollout([two]).prompt_length, rollout([two]).logprobs) == (2, (None, None, None, None, -0.5))
    assert (rollout([one]).branch, rollout([two]).branch) == (0, 1)
    assert rollout([one]).group_id == rollout([two]).group_id


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((ROOT, {"parent": 0, "sampled": True}), ["token_ids_missing"]),
        ((ROOT, sampled(0, 13, mask=None)), ["bad_field"]),
        ((ROOT, sampled(0, 13, mask=[True, False])), ["length_mismatch"]),
        ((ROOT, sampled(0, 13, 14, logprobs=[-0.5])), ["logprob_mismatch"]),
        ((ROOT, sampled(1, 13)), ["bad_field"]),
        ((ROOT, sampled(-1, 13)), ["bad_field"]),
        ((ROOT, sampled(0, 13, mask=[True, True]), sampled(0, 14)), ["length_mismatch", None]),
        ((), ["bad_field"]),
    ],
)
def test_a_prime_leaf_that_does_not_hold_together_is_refused(
    tmp_path: Path, nodes: tuple[dict[str, Any], ...], expected: list[str | None]
) -> None:
    assert reasons(read_records(tmp_path / "traces.jsonl", episode(*nodes))) == expected


def test_prime_images_are_noticed(tmp_path: Path) -> None:
    message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "a"}],
    }
    record = episode(ROOT | {"message": message}, sampled(0, 13))
    assert rollout(read_records(tmp_path / "traces.jsonl", record)).multimodal is True


def test_prime_token_export_has_no_version_and_keeps_trainer_logprobs_apart(tmp_path: Path) -> None:
    record = {
        "token_ids": [11, 12, 21, 22], "position_ids": [0, 1, 2, 3], "loss_mask": [False, False, True, False],
        "inference_logprobs": [0.0, 0.0, -0.5, -0.25], "trainer_logprobs": [-10.4, -2.0, -0.51, -0.26],
        "advantages": [0.0, 0.0, 1.0, 0.0], "env_name": "math",
    }  # fmt: skip
    path = tmp_path / "token_exports/step_4/rank_0.jsonl"
    item = rollout(read_records(path, record, assume_synchronous=True))
    assert (item.version, item.file_step, item.domain) == (None, 4, "math")
    assert item.sampled_mask == (False, False, True, True), "a masked token with a logprob was sampled"
    assert item.loss_mask == (False, False, True, False)
    assert item.trainer_logprobs == (None, -2.0, -0.51, -0.26)


# slime, vime


def test_slime_group_numbers_start_anew_so_the_prompt_is_the_group(tmp_path: Path) -> None:
    one, two = changed(5), changed(5, group_index=9, file_step=8, weight_versions=["9"])
    first, second = read_records(tmp_path / "s.jsonl", one, two)
    assert rollout([first]).group_id == rollout([second]).group_id
    assert (rollout([first]).source_group, rollout([second]).source_group) == ("3", "9")
    assert rollout([first]).finish == "length"
    assert rollout([first]).reward is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response_length": 6}, "length_mismatch"),
        ({"loss_mask": [1, 0]}, "length_mismatch"),
        ({"rollout_log_probs": [-0.5]}, "logprob_mismatch"),
        ({"rollout_log_probs": [-0.5, 0.0, 0.5]}, "logprob_mismatch"),
        ({"tokens": None}, "token_ids_missing"),
        ({"tokens": []}, "length_mismatch"),
    ],
)
def test_a_slime_sample_that_does_not_hold_together_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(read_records(tmp_path / "s.jsonl", changed(5, **changes))) == [reason]


@pytest.mark.parametrize("labels", [["default"], ["0"], ["8", "default"], [""], None])
def test_slime_labels_that_name_no_version_leave_it_null(tmp_path: Path, labels: list[str] | None) -> None:
    item = rollout(
        read_records(tmp_path / "s.jsonl", changed(5, weight_versions=labels), assume_synchronous=True)
    )
    assert item.version is None


# verl


def test_verl_padding_comes_from_the_attention_mask_not_from_the_pad_id(tmp_path: Path) -> None:
    record = {
        "prompts": [2, 2, 11, 2], "responses": [21, 2, 90, 2], "response_mask": [1, 1, 0, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0], "rollout_log_probs": [-0.5, -0.25, 0.0, 0.0],
        "uid": "u", "global_steps": 7, "rm_scores": [0.0, 0.0, 1.0, 0.0], "min_global_steps": 6,
        "max_global_steps": 6,
    }  # fmt: skip
    item = rollout(read_records(tmp_path / "gen_batch.jsonl", record))
    assert (item.token_ids, item.prompt_length) == ((11, 2, 21, 2, 90), 2)
    assert item.sampled_mask == (False, False, True, True, False)
    assert item.logprobs == (None, None, -0.5, -0.25, None)
    assert (item.version, item.reward, item.source_group) == (6, 1.0, "u")


def test_verl_and_skyrl_pad_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    for name, records in (
        ("v.jsonl", [changed(4), changed(4, is_padding=True)]),
        ("s.jsonl", [changed(9), changed(9, pad_row=True)]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in records))
        _, counts = read_file(tmp_path / name)
        assert (counts.lines, counts.rollouts, counts.pad_rows) == (2, 1, 1)


# SkyRL


def test_skyrl_without_logprobs_takes_what_the_loss_counted_as_sampled(tmp_path: Path) -> None:
    record = changed(9, rollout_logprobs=None, loss_mask=[0.0, 1.0, 1.0, 0.0])
    item = rollout(read_records(tmp_path / "global_step_5_training_input.jsonl", record))
    assert (item.sampled_mask, item.logprobs) == ((False, False, True, True, False), None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_mask": [1, 1]}, "length_mismatch"),
        ({"response_mask": [1] * 8}, "length_mismatch"),
        ({"loss_mask": [0.5, 1, 1, 1]}, "bad_field"),
        ({"sequences": None}, "token_ids_missing"),
    ],
)
def test_a_skyrl_row_that_does_not_hold_together_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reasons(read_records(tmp_path / "s.jsonl", changed(9, **changes))) == [reason]


# text only

TRL = {"step": 5, "prompt": "user say hi", "completion": "hello", "accuracy": 1.0, "advantage": 0.5}
EVAL = {
    "input_prompt": "user say hi", "output_response": "hello<|end|>", "score": 1.0, "stop_reason": "stop",
    "env_class": "e", "env_extras": {}, "data_source": "math",
}  # fmt: skip


def test_trl_parquet_and_skyrl_evals_have_their_own_steps(tmp_path: Path, tokenizer_folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "completions_00005.parquet"
    pq.write_table(pa.Table.from_pylist([TRL]), path)
    options: dict[str, Any] = {
        "allow_retokenise": True, "tokenizer": str(tokenizer_folder), "assume_synchronous": True,
    }  # fmt: skip
    (item,), _ = read_file(path, **options)
    assert (rollout([item]).version, rollout([item]).source) == (4, "trl")
    path = tmp_path / "dumped_evals/global_step_6_evals/math.jsonl"
    found = rollout(read_records(path, EVAL, **options))
    assert (found.version, found.source, found.finish, found.domain) == (6, "skyrl-evals", "stop", "math")
    assert found.token_ids[-1] == 0, "a special token that stands in the text is one token"
    for other in (rollout([item]), found):
        assert (other.token_source, other.may_verify) == ("retokenised", False)


def test_a_verl_evaluation_ran_after_the_update_of_its_step(tmp_path: Path, tokenizer_folder: Path) -> None:
    options: dict[str, Any] = {
        "allow_retokenise": True, "tokenizer": str(tokenizer_folder), "assume_synchronous": True, "evaluation": True,
    }  # fmt: skip
    assert rollout(read_records(tmp_path / "12.jsonl", changed(3), **options)).version == 12


def test_text_is_refused_row_by_row_without_the_flag_and_needs_a_tokenizer_with_it(tmp_path: Path) -> None:
    items = read_records(tmp_path / "t.jsonl", TRL, TRL)
    assert reasons(items) == ["text_only", "text_only"]
    assert "--allow-retokenise" in items[0].detail  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"tokenizer.json"):
        read_records(tmp_path / "t.jsonl", TRL, allow_retokenise=True)
    with pytest.raises(InputError, match="no tokenizer at"):
        read_records(tmp_path / "t.jsonl", TRL, allow_retokenise=True, tokenizer=str(tmp_path))


# all


def test_the_same_tokens_of_one_version_count_once_and_of_an_unknown_one_each_time(tmp_path: Path) -> None:
    known, unknown = response(), response(weight_versions=None)
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (known, known, unknown, unknown)))
    items, counts = read_file(tmp_path / "g.jsonl")
    assert (counts.lines, counts.rollouts, counts.duplicates) == (4, 3, 1)
    assert [i.source_row for i in items if isinstance(i, Rollout)] == [1, 3, 4]


def test_a_named_sample_that_comes_again_is_left_to_the_collector(tmp_path: Path) -> None:
    base = {
        "sample_id": "a", "group_id": "g", "token_ids": [1, 2], "prompt_length": 1, "sampled_mask": [False, True],
        "version": 0,
    }  # fmt: skip
    other_mask, other_name = base | {"loss_mask": [False, False]}, base | {"sample_id": "b"}
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (base, other_mask, other_name)))
    items, counts = read_file(tmp_path / "r.jsonl")
    assert [(i.sample_id, i.loss_mask) for i in items if isinstance(i, Rollout)] == [
        ("a", None), ("a", (False, False)),
    ]  # fmt: skip
    assert counts.duplicates == 1


def test_what_the_user_states_fills_gaps_and_overrules_nothing(tmp_path: Path) -> None:
    item = rollout(
        read_records(
            tmp_path / "g.jsonl", changed(5), logprob_kind="engine_raw", temperature=0.5, top_p=1.0, top_k=-1
        )
    )
    assert (item.logprob_kind, item.temperature, item.top_p, item.top_k) == ("engine_raw", 0.5, 1.0, -1)
    own = {
        "sample_id": "a", "group_id": "g", "token_ids": [1, 2], "prompt_length": 1, "sampled_mask": [False, True],
        "version": 0, "temperature": 1.0, "logprobs": [None, -1.0], "logprob_kind": "engine_processed",
    }  # fmt: skip
    item = rollout(read_records(tmp_path / "r.jsonl", own, logprob_kind="engine_raw", temperature=0.5))
    assert (item.logprob_kind, item.temperature, item.source) == (
        "engine_processed",
        1.0,
        "draftlake-rollout-1",
    )

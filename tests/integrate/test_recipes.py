"""The recipes of docs/integrate run as they are printed."""

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
import typer

from features.catalog import Catalog
from features.collect.taps.hf_head import head_from_model
from features.lake import Lake
from features.schema import SelectionFilter
from pipelines.cli import build_app, main

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "integrate"
COMMANDS: Any = typer.main.get_command(build_app())


def blocks(recipe: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (RECIPES / recipe).read_text(), flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ``./target``, a tiny random Llama."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("target")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"t{token}": token for token in range(3, 64)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained("target")
    return tmp_path


def run_commands(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recipe tells to type first, each with success."""
    for line in blocks(recipe, "console")[0].splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(line.removeprefix("$ ")))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, line


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.md")))
def test_every_recipe_names_what_exists_and_says_what_was_not_run(recipe: str) -> None:
    if recipe != "vllm.md":  # all of it is run, see tests/features/collect/test_vllm_replay.py
        assert "\n## Run here / not run here\n" in (RECIPES / recipe).read_text()
    for block in blocks(recipe, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("features."):
                module = importlib.import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
    for line in "".join(blocks(recipe, "console")).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "))
        if words[0] == "draftlake":
            command = COMMANDS.commands[words[1]]
            assert command.make_context(
                words[1], words[2:]
            ).params  # raises on what the command does not take


def windows_by_version(lake: Lake) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in Catalog.load(lake).select(SelectionFilter()).rows:
        found.setdefault(row["target_version"], []).append(row)
    return found


def test_the_transformers_loop_collects_and_trains_as_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_commands("transformers.md", monkeypatch)
    (recipe,) = blocks("transformers.md", "python")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(recipe, str(RECIPES / "transformers.md"), "exec"), names)

    lake, updates, report = Lake.open("./lake"), names["UPDATES"], names["report"]
    windows = windows_by_version(lake)
    assert sorted(windows) == list(range(updates))
    assert {row["verification"] for rows in windows.values() for row in rows} == {"verified"}
    assert report.windows == report.verified == sum(map(len, windows.values())) > 2 * updates
    assert report.skipped_by_sampling > 0
    assert report.accounted_windows == report.planned_windows
    heads = [record.head_id for record in lake.versions()]
    assert len(set(heads)) == updates + 1, "a head for each version, and one for what the last update left"
    assert heads[-1] == head_from_model(names["model"]).head_id

    torch.manual_seed(0)  # as the recipe does
    plain = transformers.AutoModelForCausalLM.from_pretrained("./target").train()
    started = {name: weight.clone() for name, weight in plain.state_dict().items()}
    names["train"](plain, None)
    for name, weight in names["model"].state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name
        assert not torch.equal(weight, started[name]), f"{name} was never trained"


def reward_odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


@torch.no_grad()
def generate_with_logprobs(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """An engine that records what it sampled, as TRL's ``rollout_func``."""
    tokenizer, answers, logprobs = trainer.processing_class, [], []
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    trainer.model.eval()
    for prompt in ids:
        out = trainer.model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=True, top_k=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        answer = out.sequences[0, len(prompt) :]
        log_p = torch.stack(out.logits, 1)[0].log_softmax(-1)
        answers.append(answer.tolist())
        logprobs.append(log_p.gather(-1, answer[:, None])[:, 0].tolist())
    trainer.model.train()
    return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}


@pytest.fixture
def grpo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The TRL recipe's definitions, and the dataset and reward that it leaves to the reader."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    run_commands("trl.md", monkeypatch)
    prompts = ["t5 t9 t11", "t7 t8", "t12 t13 t14 t15", "t6"]
    names: dict[str, Any] = {
        "__name__": "recipe", "rewards": reward_odd, "dataset": datasets.Dataset.from_dict({"prompt": prompts}),
    }  # fmt: skip
    exec(compile(blocks("trl.md", "python")[0], str(RECIPES / "trl.md"), "exec"), names)
    return names


def grpo_config(**changes: Any) -> Any:
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": "./out", "max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "bf16": False,
        "use_cpu": True, "report_to": "none", "seed": 3, "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False,
    }  # fmt: skip
    return GRPOConfig(**settings | changes)


@pytest.mark.parametrize("engine", ["transformers", "recorded"])
def test_the_trl_trainer_collects_and_trains_as_without(grpo: dict[str, Any], engine: str) -> None:
    from trl import GRPOTrainer

    more = {"rollout_func": generate_with_logprobs} if engine == "recorded" else {}
    grpo["config"], train, trained = grpo_config(), grpo["train"], []
    grpo["train"] = lambda *args: trained.append(train(*args, **more))
    exec(compile(blocks("trl.md", "python")[1], str(RECIPES / "trl.md"), "exec"), grpo)

    lake, report = Lake.open("./lake"), grpo["collector"].report()
    windows = windows_by_version(lake)
    assert sorted(windows) == [0, 1, 2]
    state = "verified" if engine == "recorded" else "unverified"
    assert {row["verification"] for rows in windows.values() for row in rows} == {state}
    assert report.windows == sum(map(len, windows.values())) > 3
    assert (report.sequences, report.refused, report.refused_windows) == (24, {}, {})
    assert len({record.head_id for record in lake.versions()}) == 3

    plain = GRPOTrainer(
        model="./target", train_dataset=grpo["dataset"], reward_funcs=reward_odd, args=grpo["config"], **more
    )
    plain.train()
    for name, weight in trained[0].model.state_dict().items():
        assert torch.equal(weight, plain.model.state_dict()[name]), name


def test_trl_steps_that_reuse_completions_of_older_weights_collect_none_of_them(grpo: dict[str, Any]) -> None:
    with grpo["collector_for"](Lake.open("./lake")) as collector:
        config = grpo_config(max_steps=2, num_iterations=2)
        grpo["train"]("./target", grpo["dataset"], reward_odd, config, collector)
    report = collector.report()
    assert (report.sequences, report.refused) == (16, {"version_mismatch": 8})
    assert sorted(windows_by_version(Lake.open("./lake"))) == [0]

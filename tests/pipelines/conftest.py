"""The shipped tiny target, rollouts sampled from it, lakes made of them, and the command in process."""

import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_outcome import Cli, Outcome

from features.collect.rollouts import Rollout, read_rollouts, write_rollouts
from pipelines.cli import main
from pipelines.demo.spec import DRAFT_ASSET, TARGET_ASSET

GROUPS, PROMPT, RESPONSE = 12, 8, 24
TEMPERATURE = 0.8


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command's entry point in this process."""
    monkeypatch.delenv("DRAFTLAKE_LAKE", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*argv: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["draftlake", *map(str, argv)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def target() -> Path:
    return TARGET_ASSET


@pytest.fixture(scope="session")
def draft() -> Path:
    return DRAFT_ASSET


@pytest.fixture(scope="session")
def rollouts(target: Path) -> list[Rollout]:
    """Sampled from the shipped target with a cache, with the raw logprobs that an engine would record."""
    import torch

    from pipelines.collect import load_target

    model, generator = load_target(target), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1024, (2 * GROUPS, PROMPT), generator=generator)
    step, cache, found = ids, None, []
    with torch.no_grad():
        for _ in range(RESPONSE):
            answer = model(step, past_key_values=cache, use_cache=True)
            cache, logits = answer.past_key_values, answer.logits[:, -1]
            step = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            found.append(logits.log_softmax(-1).gather(-1, step))
            ids = torch.cat([ids, step], dim=1)
    logprobs = torch.cat(found, dim=1)
    return [
        Rollout(
            sample_id=f"r{n:02d}",
            group_id=f"p{n // 2:02d}",  # four of these twelve are held out
            token_ids=tuple(ids[n].tolist()),
            prompt_length=PROMPT,
            sampled_mask=(False,) * PROMPT + (True,) * RESPONSE,
            logprobs=(None,) * PROMPT + tuple(logprobs[n].tolist()),
            logprob_kind="engine_raw",
            version=0,
            temperature=TEMPERATURE,
            top_p=1.0,
            domain="code",
            finish="length",
        )
        for n in range(len(ids))
    ]


@pytest.fixture(scope="session")
def rollout_file(rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollouts") / "v0.jsonl"
    write_rollouts(path, rollouts)
    return path


@pytest.fixture
def rewritten(rollout_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """The rollouts with fields changed: ``rewritten(version=1)`` or ``rewritten(change)``."""

    def rewrite(change: Callable[[Rollout], Rollout] | None = None, **fields: Any) -> Path:
        read: Iterable[Any] = read_rollouts(rollout_file)
        path = tmp_path / "rewritten.jsonl"
        write_rollouts(path, [change(r) if change else replace(r, **fields) for r in read])
        return path

    return rewrite


@pytest.fixture(scope="session")
def moved_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same target, as a further training would leave them."""
    import torch

    from pipelines.collect import load_target

    folder = tmp_path_factory.mktemp("moved") / "target"
    shutil.copytree(target, folder)
    model, generator = load_target(target), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture(scope="session")
def collected(
    target: Path, draft: Path, rollout_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A lake with the rollouts and the shipped draft. Copied by ``lake``; never written to."""
    from pipelines import promote
    from pipelines.collect import CollectSpec, collect
    from pipelines.context import RunContext
    from pipelines.start import init_lake

    folder = tmp_path_factory.mktemp("collected") / "lake"
    init_lake(str(folder), target=target, target_id="tiny")
    spec = CollectSpec(
        lake=str(folder), rollouts=(str(rollout_file),), target=str(target), version=0,
        dtype="float32", engine_dtype="float32",
    )  # fmt: skip
    report = collect(spec, RunContext())
    assert report.verified == 2 * GROUPS, report
    promote.import_draft(str(folder), draft)
    return folder


@pytest.fixture
def lake(collected: Path, tmp_path: Path) -> Path:
    """A lake of this test's own."""
    return Path(shutil.copytree(collected, tmp_path / "lake"))


@pytest.fixture
def empty_lake(target: Path, tmp_path: Path) -> Path:
    """A lake of the target without a version."""
    from pipelines.start import init_lake

    init_lake(str(tmp_path / "empty"), target=target, target_id="tiny")
    return tmp_path / "empty"


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """A training config of two steps."""
    path = tmp_path / "train.yaml"
    path.write_text("max_steps: 2\nbatch_tokens: 256\nmethod: {method: eagle3, ttt_steps: 2}\n")
    return path

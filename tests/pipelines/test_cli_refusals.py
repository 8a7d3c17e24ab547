"""Wrong input: one line with the remedy on stderr, exit code 1 or 2, and nothing is changed."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_outcome import Cli, collect_arguments, objects


@pytest.fixture
def shipped(lake: Path) -> str:
    (only,) = (lake / "registry" / "artifacts").iterdir()
    return only.name


@pytest.fixture
def dead_engine() -> str:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def refused(cli: Cli, lake: Path) -> Callable[..., str]:
    """Run a command that must fail with ``code``; returns its one line."""

    def run(code: int, *argv: Any) -> str:
        before = objects(lake)
        outcome = cli(*argv)
        assert outcome.code == code, outcome
        assert objects(lake) == before
        return outcome.line

    return run


VERSIONS = ("--first-version", 0, "--stop-version", 1)


@pytest.mark.parametrize(
    "argv",
    [
        ("ls",),
        ("show", "lake"),
        ("explain",),
        ("registry", "ls"),
        ("status",),
        ("eval", "abcdef"),
        ("train", *VERSIONS),
        ("approve", "abcdef", "--reason", "x"),
        ("publish", "abcdef", "--engine", "http://127.0.0.1:1"),
        ("rollback", "--engine", "http://127.0.0.1:1", "--reason", "x"),
        ("import", "."),
        ("collect", "r.jsonl", "--target", ".", "--version", 0),
    ],
    ids=lambda argv: argv[0],
)
def test_a_missing_lake(cli: Cli, tmp_path: Path, argv: tuple[Any, ...]) -> None:
    outcome = cli(*argv, "--lake", tmp_path / "nowhere")
    assert outcome.code == 2
    assert "draftlake init" in outcome.line
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_an_empty_selection(refused: Callable[..., str], lake: Path, shipped: str, verb: str) -> None:
    argv = ["train"] if verb == "train" else ["eval", shipped[:8]]
    line = refused(2, *argv, "--lake", lake, "--first-version", 7, "--stop-version", 9)
    assert "24 windows" in line, "it says what there is"


def test_nothing_collected_yet(cli: Cli, empty_lake: Path, draft: Path) -> None:
    cli("import", draft, "--lake", empty_lake)
    before = objects(empty_lake)
    (digest,) = (p.name for p in (empty_lake / "registry" / "artifacts").iterdir())
    outcome = cli("eval", digest[:8], "--lake", empty_lake)
    assert (outcome.code, "draftlake collect" in outcome.line) == (2, True)
    assert objects(empty_lake) == before


@pytest.fixture
def other_tokenizer(target: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(target, tmp_path / "other"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first, second = list(tokenizer["model"]["vocab"])[-2:]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_another_tokenizer_at_collect(
    refused: Callable[..., str], lake: Path, rollout_file: Path, other_tokenizer: Path
) -> None:
    for dry in ([], ["--dry-run"]):
        line = refused(2, *collect_arguments(lake, rollout_file, other_tokenizer, version=1), *dry)
        assert "tokenizer_digest" in line
        assert "--target" in line


def test_another_tokenizer_at_init(refused: Callable[..., str], lake: Path, other_tokenizer: Path) -> None:
    line = refused(2, "init", lake, "--target", other_tokenizer, "--target-id", "tiny")
    assert "tokenizer_digest" in line


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_version_number_that_names_other_weights(
    refused: Callable[..., str], lake: Path, rollout_file: Path, moved_target: Path, dry: list[str]
) -> None:
    line = refused(1, *collect_arguments(lake, rollout_file, moved_target, version=0), *dry)
    assert "--version" in line


def test_a_version_without_a_head(
    refused: Callable[..., str], lake: Path, shipped: str, small_config: Path
) -> None:
    for blob in (lake / "blobs").iterdir():
        blob.unlink()
    line = refused(1, "train", "--lake", lake, *VERSIONS, "--config", small_config)
    assert "head" in line


def write_draft(draft: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(draft, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"tokenizer_digest": "0" * 64}, 2, "tokenizer_digest"),
        ({"target_id": "huge"}, 2, "target_id 'huge'"),
        ({"hidden_size": 256}, 2, "hidden_size 256"),
        ({"vocab_size": 2048}, 2, "vocab_size 2048"),
        ({"layer_ids": [2, 18, 33]}, 1, "[2, 18, 33]"),
        ({"surprise": 1}, 1, "surprise"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_importing_a_draft_of_another_target_or_layout(
    refused: Callable[..., str],
    lake: Path,
    draft: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    code: int,
    said: str,
) -> None:
    line = refused(code, "import", write_draft(draft, tmp_path / "d", **changes), "--lake", lake)
    assert said in line


def test_importing_what_is_no_draft(refused: Callable[..., str], lake: Path, tmp_path: Path) -> None:
    assert "draftlake train" in refused(1, "import", tmp_path / "none", "--lake", lake)


@pytest.mark.parametrize("verb", ["eval", "train"])
def test_a_draft_that_reads_layers_the_windows_lack(
    cli: Cli, lake: Path, draft: Path, tmp_path: Path, small_config: Path, verb: str
) -> None:
    folder = write_draft(draft, tmp_path / "d", layer_ids=[1, 3, 6])
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 6]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 6]
    (folder / "config.json").write_text(json.dumps(config))
    digest = cli("import", folder, "--lake", lake, "--json").json["artifact"]
    before = objects(lake)
    warm = ["train", *VERSIONS, "--config", small_config, "--parent", digest]
    outcome = cli(*(["eval", digest] if verb == "eval" else warm), "--lake", lake)
    assert outcome.code == 1
    said = [line for line in outcome.err.splitlines() if line.startswith("draftlake: ")]
    assert len(said) == 1
    assert "Traceback" not in outcome.err
    assert "[2, 4, 5]" in said[0]
    left = {name: size for name, size in objects(lake).items() if not name.startswith("revisions/")}
    assert left == {name: size for name, size in before.items() if not name.startswith("revisions/")}


@pytest.mark.parametrize("prefix", ["", "abc", "ffffffff", "../../lake.json", "ABCDEF"])
def test_a_digest_that_names_nothing(refused: Callable[..., str], lake: Path, prefix: str) -> None:
    for argv in (["registry", "show", prefix], ["eval", prefix], ["reject", prefix, "--reason", "x"]):
        assert "draftlake registry ls" in refused(2, *argv, "--lake", lake)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs: [1\n", "is not YAML"),
        ("- epochs\n", "holds list"),
        ("", "holds NoneType"),
        ("epoch: 2\n", "no field 'epoch'"),
        ("epochs: 0\n", "epochs"),
        ("epochs: many\nseed: -1\n", "seed"),
        ("method: {method: eagle9}\n", "eagle9"),
        ("method: {method: eagle3, ttt_step: 2}\n", "ttt_step"),
    ],
)
def test_a_bad_training_config(
    refused: Callable[..., str], lake: Path, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    line = refused(2, "train", "--lake", lake, *VERSIONS, "--config", tmp_path / "bad.yaml")
    assert said in line
    assert "bad.yaml" in line


def test_a_training_config_that_is_not_there(refused: Callable[..., str], lake: Path, tmp_path: Path) -> None:
    assert "none.yaml" in refused(2, "train", "--lake", lake, *VERSIONS, "--config", tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--sample-rate", 0, "sample_rate"),
        ("--sample-rate", 2, "sample_rate"),
        ("--max-tokens", 1, "max_tokens"),
        ("--fragment-tokens", 0, "fragment_tokens"),
        ("--dtype", "float16", "dtype"),
        ("--layer-ids", "2,four", "four"),
        ("--layer-ids", "5,2", "ascending"),
        ("--layer-ids", "2,99", "[0, 8]"),
    ],
)
def test_options_of_collect_that_do_not_fit(
    refused: Callable[..., str],
    lake: Path,
    rollout_file: Path,
    moved_target: Path,
    option: str,
    value: Any,
    said: str,
) -> None:
    argv = collect_arguments(lake, rollout_file, moved_target, version=1)
    assert said in refused(2, *argv, option, value)


def test_a_rollout_file_that_is_not_there(
    refused: Callable[..., str], lake: Path, rollout_file: Path, moved_target: Path, tmp_path: Path
) -> None:
    argv = collect_arguments(lake, rollout_file, moved_target, version=1)
    assert "none.jsonl" in refused(2, *argv, tmp_path / "none.jsonl")


@pytest.mark.parametrize("there", [False, True], ids=["absent", "empty"])
def test_a_target_folder_without_a_model(
    refused: Callable[..., str], lake: Path, rollout_file: Path, tmp_path: Path, there: bool
) -> None:
    folder = tmp_path / "no-model"
    if there:
        folder.mkdir()
    assert "config.json" in refused(2, *collect_arguments(lake, rollout_file, folder, version=1))
    outcome_line = refused(2, "init", tmp_path / "new", "--target", folder, "--target-id", "x")
    assert "config.json" in outcome_line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", ["train", "explain", "eval"])
def test_a_range_that_stops_where_it_starts(
    refused: Callable[..., str], lake: Path, shipped: str, verb: str
) -> None:
    argv = [verb, shipped] if verb == "eval" else [verb]
    line = refused(2, *argv, "--lake", lake, "--first-version", 3, "--stop-version", 3)
    assert "--stop-version 4" in line


def test_a_stop_version_without_a_first_one(refused: Callable[..., str], lake: Path, shipped: str) -> None:
    assert "--first-version" in refused(2, "eval", shipped, "--stop-version", 1, "--lake", lake)


@pytest.mark.parametrize(("name", "code"), [("v7", 1), ("no-such-sample", 2), ("v²", 2)])
def test_showing_what_is_not_there(refused: Callable[..., str], lake: Path, name: str, code: int) -> None:
    assert name.removeprefix("v") in refused(code, "show", name, "--lake", lake)


def test_publishing_to_a_dead_engine(
    cli: Cli, refused: Callable[..., str], lake: Path, shipped: str, dead_engine: str
) -> None:
    assert cli("approve", shipped, "--force", "--reason", "first", "--lake", lake).code == 0
    before = objects(lake)
    outcome = cli("publish", shipped, "--engine", dead_engine, "--lake", lake)
    assert outcome.code == 1
    assert "cannot be reached" in outcome.err
    assert "No engine was changed" in outcome.err
    assert "Traceback" not in outcome.err
    assert objects(lake) == before
    assert "cannot be reached" in refused(
        1, "publish", shipped, "--dry-run", "--engine", dead_engine, "--lake", lake
    )


@pytest.mark.parametrize("engines", [["nowhere"], ["http://127.0.0.1:1", "http://127.0.0.1:1/"]])
def test_engines_that_are_none_or_named_twice(
    cli: Cli, refused: Callable[..., str], lake: Path, shipped: str, engines: list[str]
) -> None:
    cli("approve", shipped, "--force", "--reason", "first", "--lake", lake)
    named = [part for engine in engines for part in ("--engine", engine)]
    assert "--engine" in refused(2, "publish", shipped, *named, "--lake", lake)


def test_status_of_a_dead_engine_still_tells_of_the_registry(cli: Cli, lake: Path, dead_engine: str) -> None:
    outcome = cli("status", "--engine", dead_engine, "--lake", lake, "--json")
    assert outcome.code == 1
    (row,) = outcome.json["engines"]
    assert row["serves_production"] is False
    assert "cannot be reached" in row["error"]
    assert "cannot be reached" in outcome.err


def test_publishing_what_nobody_approved(
    refused: Callable[..., str], lake: Path, shipped: str, dead_engine: str
) -> None:
    line = refused(3, "publish", shipped, "--engine", dead_engine, "--lake", lake)
    assert "draftlake approve" in line


def test_rolling_back_without_a_history(refused: Callable[..., str], lake: Path, dead_engine: str) -> None:
    line = refused(2, "rollback", "--engine", dead_engine, "--reason", "x", "--lake", lake)
    assert "no earlier draft" in line


def test_a_decision_without_a_reason(cli: Cli, lake: Path, shipped: str) -> None:
    before = objects(lake)
    for verb in ("approve", "reject"):
        outcome = cli(verb, shipped, "--reason", "  ", "--lake", lake)
        assert (outcome.code, outcome.out) == (2, "")
        assert "--reason" in outcome.err
    assert objects(lake) == before


def test_a_lake_of_a_newer_format(cli: Cli, lake: Path) -> None:
    path = lake / "lake.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    outcome = cli("ls", "--lake", lake)
    assert (outcome.code, "Upgrade" in outcome.line) == (1, True)


def test_a_file_where_the_lake_should_be(cli: Cli, target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for at in (tmp_path / "file", tmp_path / "file" / "lake"):
        assert cli("ls", "--lake", at).code == 2
        outcome = cli("init", at, "--target", target, "--target-id", "tiny")
        assert outcome.code == 1
        assert "permissions" in outcome.line
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_an_unwritable_folder(cli: Cli, target: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    outcome = cli("init", tmp_path / "lake", "--target", target, "--target-id", "tiny")
    assert outcome.code == 1
    assert "permissions" in outcome.line


def test_an_unwritable_store(cli: Cli, lake: Path, shipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Any, path: str, _data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("features.storage.LocalStore.create", refuse)
    outcome = cli("reject", shipped, "--reason", "x", "--lake", lake)
    assert outcome.code == 1
    assert "Permission denied" in outcome.line


def test_an_unknown_protocol(cli: Cli) -> None:
    outcome = cli("ls", "--lake", "ftp://user:secret@host/lake")
    assert outcome.code == 2
    assert "secret" not in outcome.line


def test_an_interrupt_ends_with_130(cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.inspect.list_versions", interrupt)
    outcome = cli("ls", "--lake", lake)
    assert (outcome.code, outcome.out) == (130, "")
    assert "Traceback" not in outcome.err


def test_a_bug_keeps_its_traceback(cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("pipelines.inspect.list_versions", fail)
    with pytest.raises(ValueError, match="a bug"):
        cli("ls", "--lake", lake)


def test_an_unknown_log_level_is_no_reason_to_fail(
    cli: Cli, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLAKE_LOG", "loud")
    assert cli("ls", "--lake", lake).code == 0

"""The registry: artifacts, evidence, approvals and state."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from features.errors import (
    CorruptDataError,
    DraftLayoutError,
    GateRefusedError,
    InputError,
    TargetMismatchError,
)
from features.storage import Store
from publish.channels import ArtifactState
from publish.evidence import evidence_id
from publish.gates import GateSpec, decide
from publish.registry import Registry
from publish.testing import TARGET_ID, make_report, write_artifact
from training.artifact import ARTIFACT_FILES, MANIFEST_FILE, WEIGHTS_FILE, Interval, load_artifact

REPO = Path(__file__).resolve().parents[2]
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)


def later(minutes: int) -> datetime:
    return NOON + timedelta(minutes=minutes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def registry(root: Path) -> Registry:
    return Registry(Store.open(str(root)), TARGET_ID)


def imported(registry: Registry, tmp_path: Path, seed: int = 0, **config: Any) -> str:
    return registry.import_artifact(write_artifact(tmp_path / f"draft-{seed}", seed=seed, **config))


def file_gate(registry: Registry, digest: str, baseline: str, **changes: Any) -> str:
    report = make_report(digest, baseline, **changes)
    registry.add_evidence(digest, report)
    return registry.add_evidence(digest, decide(report, GateSpec(), newest_version=5))


def serve(registry: Registry, digest: str, minutes: int, action: Any = "publish") -> None:
    channel = registry.channel("eagle3")
    head = channel.head()
    channel.advance(
        expected_seq=head.seq if head else 0,
        artifact=digest,
        action=action,
        reason="test",
        by="ci",
        at=later(minutes),
    )


def force(registry: Registry, digest: str, minutes: int) -> None:
    registry.approve(digest, reviewer="ada", reason="first draft", at=later(minutes), force=True)


# -- artifacts


def test_import_registers_a_folder_under_its_own_digest(registry: Registry, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "draft")
    digest = registry.import_artifact(folder)
    assert digest == load_artifact(folder).digest == registry.artifact(digest).digest
    assert registry.digests() == (digest,)
    assert registry.artifact_uri(digest) == f"{tmp_path}/lake/registry/artifacts/{digest}"
    assert registry.manifest(digest).versions == (0, 1)


def test_importing_again_is_harmless(registry: Registry, root: Path, tmp_path: Path) -> None:
    first = imported(registry, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert imported(registry, tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_another_encoding_of_the_same_draft_is_the_same_artifact(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    folder = write_artifact(tmp_path / "again")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=2))
    assert registry.import_artifact(folder) == digest
    assert registry.artifact(digest).digest == digest


@pytest.mark.parametrize("name", ARTIFACT_FILES)
def test_a_folder_without_one_file_is_refused_and_nothing_is_written(
    registry: Registry, root: Path, tmp_path: Path, name: str
) -> None:
    folder = write_artifact(tmp_path / "draft")
    (folder / name).unlink()
    with pytest.raises(DraftLayoutError, match=name):
        registry.import_artifact(folder)
    assert not root.exists()


@pytest.mark.parametrize("fault", ["one byte short", "half", "lfs pointer", "trailing bytes"])
def test_a_folder_with_damaged_weights_is_refused(
    registry: Registry, root: Path, tmp_path: Path, fault: str
) -> None:
    folder = write_artifact(tmp_path / "draft")
    damage(folder / WEIGHTS_FILE, fault)
    with pytest.raises(DraftLayoutError, match="no complete safetensors file"):
        registry.import_artifact(folder)
    assert not root.exists()


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_folder_with_unreadable_json_is_refused(registry: Registry, tmp_path: Path, name: str) -> None:
    folder = write_artifact(tmp_path / "draft")
    (folder / name).write_bytes(b'{"cut": ')
    with pytest.raises(DraftLayoutError, match="not what a draft artifact holds"):
        registry.import_artifact(folder)


def test_a_draft_of_another_target_is_refused(registry: Registry, root: Path, tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "draft", target_id="org/other")
    with pytest.raises(TargetMismatchError, match="org/other"):
        registry.import_artifact(folder)
    assert not root.exists()


def damage(file: Path, fault: str) -> None:
    raw = file.read_bytes()
    match fault:
        case "one byte short":
            file.write_bytes(raw[:-1])
        case "half":
            file.write_bytes(raw[: len(raw) // 2])
        case "lfs pointer":
            file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64)
        case "trailing bytes":
            file.write_bytes(raw + b"\0" * 8)
        case "one bit flipped":
            file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        case "gone":
            file.unlink()


@pytest.mark.parametrize(
    "fault", ["one byte short", "half", "lfs pointer", "trailing bytes", "one bit flipped", "gone"]
)
def test_weights_damaged_in_the_registry_are_found_on_fetch(
    registry: Registry, root: Path, tmp_path: Path, fault: str
) -> None:
    digest = imported(registry, tmp_path)
    damage(root / "registry/artifacts" / digest / WEIGHTS_FILE, fault)
    with pytest.raises(CorruptDataError, match="must not be served"):
        registry.fetch(digest, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    assert not list(tmp_path.glob(".fetched*"))
    if fault != "gone":  # a missing file is simply completed
        with pytest.raises(CorruptDataError):
            imported(registry, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_settings_altered_in_the_registry_are_found_on_fetch(
    registry: Registry, root: Path, tmp_path: Path, name: str
) -> None:
    digest = imported(registry, tmp_path)
    file = root / "registry/artifacts" / digest / name
    file.write_text(file.read_text().replace("3", "4", 1))
    with pytest.raises(CorruptDataError, match="was altered"):
        registry.fetch(digest, tmp_path / "fetched")


def test_fetch_gives_a_folder_that_loads_and_may_be_repeated(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    for _ in range(2):
        assert registry.fetch(digest, tmp_path / "deep" / "fetched") == tmp_path / "deep" / "fetched"
    assert load_artifact(tmp_path / "deep" / "fetched").digest == digest
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["fetched"]


def test_fetch_never_overwrites_what_lies_there(registry: Registry, tmp_path: Path) -> None:
    digest, other = imported(registry, tmp_path, 0), write_artifact(tmp_path / "draft-1", seed=1)
    with pytest.raises(InputError, match="does not hold artifact"):
        registry.fetch(digest, other)
    assert load_artifact(other).digest != digest


@pytest.mark.parametrize("digest", ["0" * 64, "abc", "../../etc", ""])
def test_an_unknown_digest_is_a_clear_input_error(registry: Registry, digest: str) -> None:
    for call in (registry.artifact, registry.state, registry.evidence, registry.artifact_uri):
        with pytest.raises(InputError, match="draftlake registry ls"):
            call(digest)


def test_a_unique_prefix_names_an_artifact(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    assert registry.resolve(digest[:8]) == registry.resolve(digest) == digest
    for prefix in (digest[:5], "", "zzzzzz"):
        with pytest.raises(InputError, match="6 or more digits"):
            registry.resolve(prefix)


CRASHING_IMPORT = """
    import os, signal, sys
    from pathlib import Path
    from features.storage import LocalStore
    from publish.registry import Registry
    from publish.testing import TARGET_ID

    class DyingStore(LocalStore):
        left = int(sys.argv[3])
        def create(self, path, data):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            super().create(path, data)

    Registry(DyingStore(Path(sys.argv[1])), TARGET_ID).import_artifact(Path(sys.argv[2]))
"""


def run_python(source: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("files_before_the_kill", [0, 1, 2])
def test_kill_during_import_leaves_nothing_visible_and_a_rerun_completes_it(
    registry: Registry, root: Path, tmp_path: Path, files_before_the_kill: int
) -> None:
    folder = write_artifact(tmp_path / "draft")
    digest = load_artifact(folder).digest
    process = run_python(CRASHING_IMPORT, str(root), str(folder), str(files_before_the_kill))
    assert process.wait(timeout=60) == -signal.SIGKILL
    written = [path.name for path in root.rglob("*") if path.is_file()]
    assert len(written) == files_before_the_kill
    assert MANIFEST_FILE not in written
    assert registry.digests() == ()
    assert registry.list() == ()
    with pytest.raises(InputError):
        registry.fetch(digest, tmp_path / "fetched")
    assert registry.import_artifact(folder) == digest
    assert registry.artifact(digest).digest == digest


# -- evidence


def test_filing_a_document_twice_is_one_document(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    report = make_report(digest)
    first, again = (registry.add_evidence(digest, report) for _ in range(2))
    assert first == again == evidence_id(report)
    (found,) = registry.evidence(digest)
    assert (found.id, found.kind) == (first, "evaluation")
    assert registry.evaluations(digest) == (report,)


def test_evidence_is_listed_by_kind_and_never_changes_the_artifact(
    registry: Registry, tmp_path: Path
) -> None:
    digest = imported(registry, tmp_path)
    registry.add_evidence(digest, make_report(digest))
    registry.add_evidence(digest, {"kind": "publication", "engines": {"e0": "swapped"}, "seconds": 0.07})
    registry.add_evidence(digest, {"kind": "calibration", "offline_tau": 2.1, "engine_tau": None})
    assert {item.kind for item in registry.evidence(digest)} == {"evaluation", "publication", "calibration"}
    (calibration,) = registry.evidence(digest, "calibration")
    assert calibration.document == {"kind": "calibration", "offline_tau": 2.1, "engine_tau": None}
    assert registry.artifact(digest).digest == digest


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"engine_tau": 2.0}, "needs a 'kind'"),
        ({"kind": "rumour"}, "needs a 'kind'"),
        ({"kind": "calibration", "engine_tau": float("nan")}, "null for an unknown number"),
        ({"kind": "publication", "at": NOON}, "ISO 8601"),
        ({"kind": "publication", "artifact": "f" * 64}, "is about artifact"),
        ({"kind": "decision", "decision": "approve"}, "no valid decision"),
        ({"kind": "decision"}, "no valid decision"),
        ({"kind": "evaluation", "tau": 9}, "no valid evaluation"),
    ],
)
def test_a_document_that_says_nothing_usable_is_refused(
    registry: Registry, tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    digest = imported(registry, tmp_path)
    with pytest.raises(InputError, match=message):
        registry.add_evidence(digest, document)
    assert registry.evidence(digest) == ()


def test_evidence_about_an_absent_artifact_is_refused(registry: Registry) -> None:
    with pytest.raises(InputError, match="no artifact"):
        registry.add_evidence("a" * 64, {"kind": "calibration"})


@pytest.mark.parametrize("content", [b'{"kind":"calibration","tau":9.9}', b'{"kind":', b"[]"])
def test_altered_evidence_is_refused_by_name(
    registry: Registry, root: Path, tmp_path: Path, content: bytes
) -> None:
    digest = imported(registry, tmp_path)
    document_id = registry.add_evidence(digest, {"kind": "calibration", "tau": 2.1})
    (root / "registry/evidence" / digest / f"{document_id}.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match=document_id):
        registry.evidence(digest)


# -- approval


def test_approval_needs_a_gate(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    registry.add_evidence(digest, make_report(digest, "b" * 64))
    with pytest.raises(GateRefusedError, match="no gate decision is on file"):
        registry.approve(digest, reviewer="ada", reason="looks good", at=NOON)
    assert registry.decisions(digest) == ()


def test_a_passing_gate_allows_approval_and_the_decision_names_it(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    gate_id = file_gate(registry, digest, "b" * 64)
    decision_id = registry.approve(digest, reviewer="ada", reason="better", at=NOON)
    (decision,) = registry.decisions(digest)
    assert (decision.gate, decision.baseline, decision.forced) == (gate_id, "b" * 64, False)
    assert (decision.reviewer, decision.reason, decision.at) == ("ada", "better", NOON)
    assert registry.state(digest) == ArtifactState.APPROVED
    assert [item.id for item in registry.evidence(digest, "decision")] == [decision_id]


def test_a_refused_gate_refuses_approval_with_its_reasons(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    file_gate(registry, digest, "b" * 64, gain=Interval(value=-0.2, low=-0.3, high=-0.1))
    with pytest.raises(GateRefusedError, match=r"REFUSED: gain"):
        registry.approve(digest, reviewer="ada", reason="hope", at=NOON)


def test_a_forced_approval_records_what_it_set_aside(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    force(registry, digest, 0)
    (decision,) = registry.decisions(digest)
    assert decision.forced
    assert decision.overruled == ("no gate decision is on file for it",)


def test_force_on_a_draft_that_passed_is_not_recorded_as_forced(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    file_gate(registry, digest, "b" * 64)
    force(registry, digest, 0)
    assert not registry.decisions(digest)[0].forced


def test_a_gate_document_that_only_claims_to_have_passed_does_not_count(
    registry: Registry, tmp_path: Path
) -> None:
    digest = imported(registry, tmp_path)
    report = make_report(digest, "b" * 64, split="train")
    verdict = decide(report, GateSpec(), newest_version=5)
    registry.add_evidence(digest, report)
    forged = verdict.model_dump(mode="json") | {"passed": True}
    registry.add_evidence(digest, forged)
    with pytest.raises(GateRefusedError, match="does not follow from evaluation"):
        registry.approve(digest, reviewer="ada", reason="trust me", at=NOON)


def test_a_gate_without_its_evaluation_on_file_does_not_count(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    registry.add_evidence(digest, decide(make_report(digest, "b" * 64), GateSpec(), newest_version=5))
    with pytest.raises(GateRefusedError, match="is not on file"):
        registry.approve(digest, reviewer="ada", reason="better", at=NOON)


def test_a_pass_at_an_older_version_is_outdated_by_a_refusal_at_a_newer_one(
    registry: Registry, tmp_path: Path
) -> None:
    digest = imported(registry, tmp_path)
    file_gate(registry, digest, "b" * 64)
    registry.add_evidence(digest, decide(make_report(digest, "b" * 64), GateSpec(), newest_version=6))
    with pytest.raises(GateRefusedError, match="needs windows of v6 only"):
        registry.approve(digest, reviewer="ada", reason="was fine", at=NOON)


def test_a_gate_against_another_draft_than_production_is_stale(registry: Registry, tmp_path: Path) -> None:
    stale, served = imported(registry, tmp_path, 0), imported(registry, tmp_path, 1)
    force(registry, served, 0)
    serve(registry, served, 1)
    file_gate(registry, stale, "b" * 64)
    with pytest.raises(GateRefusedError, match=f"production is {served[:12]} now"):
        registry.approve(stale, reviewer="ada", reason="better", at=later(2))
    file_gate(registry, stale, served)
    registry.approve(stale, reviewer="ada", reason="better", at=later(2))


@pytest.mark.parametrize(
    "words", [{"reviewer": " "}, {"reviewer": ""}, {"reason": ""}, {"at": NOON.replace(tzinfo=None)}]
)
def test_a_decision_needs_a_reviewer_a_reason_and_an_aware_time(
    registry: Registry, tmp_path: Path, words: dict[str, Any]
) -> None:
    digest = imported(registry, tmp_path)
    with pytest.raises(InputError, match="reviewer, a reason and an aware time"):
        registry.reject(digest, **{"reviewer": "ada", "reason": "slow", "at": NOON} | words)
    assert registry.state(digest) == ArtifactState.CANDIDATE


def test_repeating_a_decision_after_a_crash_is_harmless(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    first, again = (registry.reject(digest, reviewer="ada", reason="slow", at=NOON) for _ in range(2))
    assert first == again
    assert len(registry.decisions(digest)) == 1


def test_a_decision_dated_before_the_last_one_is_refused(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    registry.reject(digest, reviewer="ada", reason="slow", at=later(5))
    with pytest.raises(InputError, match="would not count"):
        registry.approve(digest, reviewer="bob", reason="no", at=later(4), force=True)


# -- state


def test_an_artifact_goes_through_all_its_states(registry: Registry, tmp_path: Path) -> None:
    old, new = imported(registry, tmp_path, 0), imported(registry, tmp_path, 1)
    states = [registry.state(old)]
    force(registry, old, 0)
    states.append(registry.state(old))
    serve(registry, old, 1)
    states.append(registry.state(old))
    file_gate(registry, new, old)
    registry.approve(new, reviewer="ada", reason="better", at=later(2))
    serve(registry, new, 3)
    states.append(registry.state(old))
    registry.reject(old, reviewer="ada", reason="bad text", at=later(4))
    states.append(registry.state(old))
    assert states == ["candidate", "approved", "production", "retired", "rejected"]
    assert registry.state(new) == ArtifactState.PRODUCTION


def test_a_rejected_draft_is_in_production_until_the_channel_moves(
    registry: Registry, tmp_path: Path
) -> None:
    old, new = imported(registry, tmp_path, 0), imported(registry, tmp_path, 1)
    for minute, digest in enumerate((old, new)):
        force(registry, digest, minute)
        serve(registry, digest, minute)
    registry.reject(new, reviewer="ada", reason="bad text", at=later(5))
    assert registry.state(new) == ArtifactState.PRODUCTION
    serve(registry, old, 6, "rollback")
    assert registry.state(new) == ArtifactState.REJECTED
    assert registry.state(old) == ArtifactState.PRODUCTION


def test_only_approved_artifacts_enter_a_channel(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    with pytest.raises(GateRefusedError, match="nobody has decided on it"):
        serve(registry, digest, 0)
    registry.reject(digest, reviewer="ada", reason="slow", at=NOON)
    with pytest.raises(GateRefusedError, match="'ada' rejected it"):
        serve(registry, digest, 0)
    assert registry.channel("eagle3").head() is None


def test_a_move_can_be_checked_before_any_engine_is_touched(registry: Registry, tmp_path: Path) -> None:
    digest, channel = imported(registry, tmp_path), registry.channel("eagle3")
    with pytest.raises(GateRefusedError, match="nobody has decided on it"):
        channel.check(digest, "publish")
    force(registry, digest, 0)
    channel.check(digest, "publish")
    assert channel.head() is None


def test_an_approval_against_a_draft_no_longer_served_does_not_publish(
    registry: Registry, tmp_path: Path
) -> None:
    served, first, second = (imported(registry, tmp_path, seed) for seed in range(3))
    force(registry, served, 0)
    serve(registry, served, 0)
    for digest in (first, second):
        file_gate(registry, digest, served)
        registry.approve(digest, reviewer="ada", reason="better", at=later(1))
    serve(registry, first, 2)
    with pytest.raises(
        GateRefusedError, match=f"compared with {served[:12]}, and production is {first[:12]}"
    ):
        serve(registry, second, 3)
    serve(registry, served, 4, "rollback")
    serve(registry, second, 5)


def test_rollback_takes_only_what_was_there_before(registry: Registry, tmp_path: Path) -> None:
    served, other = imported(registry, tmp_path, 0), imported(registry, tmp_path, 1)
    force(registry, served, 0)
    serve(registry, served, 0)
    force(registry, other, 1)
    with pytest.raises(InputError, match="publish it instead"):
        serve(registry, other, 1, "rollback")
    with pytest.raises(InputError, match="head of 'production' already"):
        serve(registry, served, 1)


def test_a_draft_of_another_method_does_not_enter_a_channel(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    force(registry, digest, 0)
    with pytest.raises(InputError, match="by method eagle3 and cannot enter"):
        registry.channel("dflash").advance(
            expected_seq=0, artifact=digest, action="publish", reason="test", by="ci", at=NOON
        )


def test_list_gives_every_artifact_with_state_and_newest_tau(registry: Registry, tmp_path: Path) -> None:
    old, new = imported(registry, tmp_path, 0), imported(registry, tmp_path, 1)
    force(registry, old, 0)
    serve(registry, old, 0)
    registry.add_evidence(new, make_report(new, old, head_version=3))
    newest = make_report(new, old)
    registry.add_evidence(new, newest)
    first, second = registry.list()
    assert (first.digest, first.state, first.tau) == (old, ArtifactState.PRODUCTION, None)
    assert (second.digest, second.state, second.tau) == (new, ArtifactState.CANDIDATE, newest.overall)
    assert second.tau_head_version == 5


def test_describe_gives_all_that_is_known_as_json(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    force(registry, digest, 0)
    registry.add_evidence(digest, make_report(digest))
    described = json.loads(registry.describe(digest).model_dump_json())
    assert (described["digest"], described["state"], described["tensors"]) == (digest, "approved", 3)
    assert {item["kind"] for item in described["evidence"]} == {"decision", "evaluation"}
    assert described["manifest"]["versions"] == [0, 1]


def test_an_untouched_store_lists_nothing_and_is_not_created(registry: Registry, root: Path) -> None:
    assert registry.list() == ()
    assert registry.channel("eagle3").history() == ()
    assert not root.exists()


def test_the_registry_is_a_pure_function_of_its_objects(
    registry: Registry, root: Path, tmp_path: Path
) -> None:
    digest = imported(registry, tmp_path)
    force(registry, digest, 0)
    serve(registry, digest, 0)
    shutil.copytree(root, tmp_path / "copy")
    assert Registry(Store.open(str(tmp_path / "copy")), TARGET_ID).list() == registry.list()


# -- diff


def test_diff_shows_settings_tensors_and_comparable_tau(registry: Registry, tmp_path: Path) -> None:
    a = imported(registry, tmp_path, 0)
    b = imported(registry, tmp_path, 1, eagle_config={"ids": [1, 2, 4]}, extra=True)
    registry.add_evidence(a, make_report(a))
    registry.add_evidence(b, make_report(b, a))
    registry.add_evidence(b, make_report(b, a, temperature=0.0, selection_digest="f" * 64))
    diff = registry.diff(a, b)
    assert [(c.key, c.a, c.b, c.absent) for c in diff.config] == [
        ("eagle_config.ids", [1, 2, 3], [1, 2, 4], None),
        ("extra", None, True, "a"),
    ]
    assert {change.key for change in diff.manifest} == {"spec.seed", "versions"}
    (tensor,) = diff.tensors
    assert (tensor.name, tensor.change, tensor.a) == ("fc.weight", "changed", "F32[4, 12]")
    assert tensor.relative_l2 is not None
    assert 0.5 < tensor.relative_l2 < 3
    assert diff.tensors_equal == 2
    assert [(e.selection_digest, e.a.value, e.b.value) for e in diff.tau] == [("e" * 64, 2.5, 2.5)]
    assert diff.gain == Interval(value=0.5, low=0.3, high=0.7)


def test_an_artifact_does_not_differ_from_itself(registry: Registry, tmp_path: Path) -> None:
    digest = imported(registry, tmp_path)
    diff = registry.diff(digest, digest)
    assert (diff.config, diff.manifest, diff.tensors, diff.tensors_equal) == ((), (), (), 3)

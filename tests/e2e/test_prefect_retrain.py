"""The retrain deployment on a real local Prefect server and worker, through the documented commands."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from features.catalog import Catalog
from features.collect.rollouts import Rollout, write_rollouts
from features.lake import Lake
from features.target import config_digest
from features.testing import (
    TINY_TARGET,
    commit_tiny,
    register_tiny_version,
    tiny_head,
    tiny_lake,
    tiny_window,
)
from flows.hooks import artifact_tag
from pipelines.demo.spec import TARGET_ASSET
from pipelines.start import init_lake
from publish.registry import Registry

pytestmark = pytest.mark.slow

SCRIPTS = Path(sysconfig.get_path("scripts"))
WATCHDOG_S = 600
"""For the module. Every step has a limit of its own; this ends the stack when one of them does not hold."""
TARGET_CONFIG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "hidden_size": 16,
}
"""What a draft takes its sizes from."""
RANGE = ("-p", "first_version=0", "-p", "stop_version=2")


@dataclass(frozen=True)
class Stack:
    """What ``draftlake flows up`` started, and the lake its worker knows."""

    api_url: str
    lake_url: str
    folder: Path
    environment: dict[str, str]

    @property
    def lake(self) -> Lake:
        return Lake.open(self.lake_url)

    @property
    def registry(self) -> Registry:
        return Registry(self.lake.store, self.lake.target.target_id)

    def start(self, *command: str) -> subprocess.Popen[str]:
        program, *arguments = command
        return subprocess.Popen(
            [str(SCRIPTS / program), *arguments],
            env=self.environment | {"PREFECT_API_URL": self.api_url},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, timeout_s: float = 150) -> tuple[int, str]:
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return process.returncode, output

    def ask(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.api_url}/{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def logs(self, run_id: str) -> list[str]:
        found = self.ask("logs/filter", logs={"flow_run_id": {"any_": [run_id]}})
        return [row["message"] for row in found]

    def newest_run(self, flow: str) -> dict[str, Any]:
        """Of one flow: a run of another may be at work beside it."""
        named = {"name": {"any_": [flow]}}
        return self.ask("flow_runs/filter", flows=named, sort="START_TIME_DESC", limit=1)[0]

    def wait_for(self, run_id: str, states: set[str], *, timeout_s: float = 90) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = httpx.get(f"{self.api_url}/flow_runs/{run_id}", timeout=30).json()["state"]["type"]
            if state in states:
                return state
            time.sleep(1)
        raise AssertionError(f"run {run_id} is {state}, expected one of {states}")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    target = replace(TINY_TARGET, config_digest=config_digest(TARGET_CONFIG))
    tiny_lake(str(folder / "lake"), versions=2, samples_per_version=40, target=target).put_target_config(
        TARGET_CONFIG
    )
    # A user's own folder of a name that is ours too must not be what the worker imports.
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").write_text("raise ImportError('this is the user folder')\n")
    home = folder / "prefect"
    outside = {
        k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "DRAFTLAKE", "PYTHONPATH"))
    }
    environment = outside | {"PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [
        str(SCRIPTS / "draftlake"),
        "flows",
        "up",
        "--port",
        str(free_port()),
        "--lake",
        "lake",
        "--json",
    ]
    with (folder / "up.log").open("w") as log:
        up = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    watchdog = threading.Timer(WATCHDOG_S, up.kill)
    watchdog.start()
    try:
        ready = first_line(up, timeout_s=200)
        assert ready, f"not up:\n{(folder / 'up.log').read_text()}"
        yield Stack(json.loads(ready)["api_url"], str(folder / "lake"), folder, environment)
        assert up.poll() is None, f"stopped by itself, or by the watchdog:\n{(folder / 'up.log').read_text()}"
    finally:
        watchdog.cancel()
        up.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            up.wait(60)
        up.kill()
        left = end_processes_of(home)
    assert left == [], "stopping the stack leaves no process behind"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_line(process: subprocess.Popen[str], *, timeout_s: float) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else ""


def wait_until(found: Callable[[], Any], *, timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError("it did not come to pass in time")


def processes_of(run_id: str, command: str) -> list[int]:
    """Processes of a flow run whose command line holds ``command``; ended ones have none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if f"PREFECT__FLOW_RUN_ID={run_id}".encode() in environment and command in line:
                found.append(int(entry.name))
    return found


def end_processes_of(home: Path) -> list[str]:
    """Kill whatever still runs with this Prefect home, and name it."""
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"PREFECT_HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                left.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
                os.kill(int(entry.name), signal.SIGKILL)
    return left


def test_a_deployment_run_registers_a_candidate_of_the_pinned_revision_with_evidence(stack: Stack) -> None:
    code, output = stack.run(
        "prefect", "deployment", "run", "retrain/local", "-p", f"lake={stack.lake_url}", *RANGE, "--watch"
    )  # fmt: skip
    run = stack.newest_run("retrain")
    assert code == 0, output + "\n".join(stack.logs(run["id"]))
    assert "Completed" in output
    (candidate,) = stack.registry.list()
    assert candidate.state == "candidate"
    revision = Catalog.load(stack.lake).revision.digest
    assert stack.registry.manifest(candidate.digest).lake_revision == revision
    assert {item.kind for item in stack.registry.evidence(candidate.digest)} == {"evaluation", "gate"}
    assert stack.registry.evaluations(candidate.digest)[0].lake_revision == revision
    assert artifact_tag(candidate.digest) in run["tags"]
    assert candidate.digest[:12] in run["state"]["message"]
    pages = stack.ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    shown = {page["key"]: json.dumps(page["data"]) for page in pages if page["key"]}  # the rest are results
    assert set(shown) == {"read-plan", "retrain-report"}
    assert all(revision in page for page in shown.values())
    assert any(f"lake revision {revision}" in line for line in stack.logs(run["id"]))


def test_two_equal_runs_at_once_both_complete_and_make_one_artifact(stack: Stack) -> None:
    """Neither names a lake: the worker's is taken."""
    before = {summary.digest for summary in stack.registry.list()}
    runs = [stack.start("prefect", "deployment", "run", "retrain/local", *RANGE, "--watch") for _ in range(2)]
    try:
        outputs = [run.communicate(timeout=200)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    after = {summary.digest for summary in stack.registry.list()}
    assert len(after) == 1
    assert before <= after


def test_killing_a_run_ends_its_trainer_and_the_next_run_goes_ahead(stack: Stack) -> None:
    code, output = stack.run("prefect", "deployment", "run", "retrain/local", *RANGE)
    assert code == 0, output
    run_id = re.search(r"UUID: (\S+)", output)[1]
    stack.wait_for(run_id, {"RUNNING"})
    trainer = wait_until(lambda: processes_of(run_id, "draftlake train"))
    (flow,) = (pid for pid in processes_of(run_id, "prefect") if pid not in trainer)
    os.kill(flow, signal.SIGKILL)
    assert wait_until(lambda: not processes_of(run_id, "draftlake train"))
    assert stack.wait_for(run_id, {"CRASHED", "COMPLETED", "FAILED"}) == "CRASHED"
    code, output = stack.run("prefect", "deployment", "run", "retrain/local", *RANGE, "--watch")
    assert code == 0, output


def test_a_retried_run_trains_on_the_revision_it_pinned_although_the_lake_has_grown(stack: Stack) -> None:
    pinned = Catalog.load(stack.lake).revision.digest
    parameters = ("-p", "epochs=0")  # refused by the trainer, after the lake was pinned
    code, output = stack.run("prefect", "deployment", "run", "retrain/local", *RANGE, *parameters, "--watch")
    assert code == 1, output
    run = stack.newest_run("retrain")
    head = tiny_head(2)
    commit_tiny(
        stack.lake, 2, register_tiny_version(stack.lake, 2, head), [tiny_window(head, version=2, sample=100)]
    )
    grown = Catalog.load(stack.lake).revision.digest
    assert grown != pinned
    code, output = stack.run("prefect", "flow-run", "retry", run["id"])
    assert code == 0, output
    stack.wait_for(run["id"], {"SCHEDULED", "PENDING", "RUNNING"}, timeout_s=20)
    assert stack.wait_for(run["id"], {"FAILED", "COMPLETED", "CRASHED"}) == "FAILED"
    started = [
        line for line in stack.logs(run["id"]) if " train --lake" in line and line.startswith("started")
    ]
    assert len(started) == 2
    assert all(f"--revision {pinned}" in line for line in started)


def test_a_decision_resumes_the_run_that_waits_for_it(stack: Stack) -> None:
    (candidate,) = stack.registry.list()
    deployment = httpx.get(f"{stack.api_url}/deployments/name/retrain/local", timeout=30).json()["id"]
    waiting = stack.ask(
        f"deployments/{deployment}/create_flow_run",
        state={"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}},
        tags=[artifact_tag(candidate.digest)],
        parameters={"lake": "/nowhere", "first_version": 0, "stop_version": 1},
    )["id"]
    code, output = stack.run(
        "draftlake", "approve", candidate.digest[:12], "--lake", stack.lake_url, "--reviewer", "ada",
        "--reason", "a test of the hook", "--force",
    )  # fmt: skip
    assert code == 0, output
    assert stack.registry.state(candidate.digest) == "approved"
    assert stack.wait_for(waiting, {"SCHEDULED", "PENDING", "RUNNING", "FAILED"}, timeout_s=20)


def test_a_backfill_run_collects_every_partition_and_its_page_accounts_for_every_line(
    stack: Stack, tmp_path: Path
) -> None:
    init_lake(str(tmp_path / "lake"), target=TARGET_ASSET, target_id="tiny")
    lake, files = Lake.open(str(tmp_path / "lake")), []
    for n in range(2):
        files.append(tmp_path / f"{n}.jsonl")
        tokens = [tuple(range(3 + 40 * n + i, 35 + 40 * n + i)) for i in range(4)]
        mask = (False,) * 8 + (True,) * 24
        write_rollouts(files[-1], [
            Rollout(
                sample_id=f"{n}-{i}", group_id=f"g{i}", token_ids=ids, prompt_length=8, sampled_mask=mask, version=0
            )
            for i, ids in enumerate(tokens)
        ])  # fmt: skip
    files[0].write_bytes(files[0].read_bytes() + b'{"cut')
    sources = json.dumps([str(tmp_path / "*.jsonl")])
    parameters = ("-p", f"lake={lake.url}", "-p", f"sources={sources}", "-p", f"target={TARGET_ASSET}")
    code, output = stack.run(
        "prefect", "deployment", "run", "backfill/local", *parameters, "-p", "version=0", "--watch"
    )  # fmt: skip
    run = stack.newest_run("backfill")
    assert code == 0, output + "\n".join(stack.logs(run["id"]))
    assert "8 of 9 sequences collected" in run["state"]["message"]
    assert Catalog.load(lake).frame.height == 8
    found = stack.ask("artifacts/filter", artifacts={"key": {"any_": ["backfill-report"]}})
    assert any("| refused: bad_json | 1 |" in artifact["data"] for artifact in found)

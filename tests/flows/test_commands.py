"""``draftlake flows``."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from features.errors import DraftlakeError, InputError
from flows import commands, local_stack
from flows.commands import app


def test_up_explains_itself_with_an_example() -> None:
    shown = CliRunner().invoke(app, ["up", "--help"])
    assert shown.exit_code == 0
    assert "Example: draftlake flows up" in shown.output
    assert "--json" in shown.output


def test_without_prefect_up_refuses_in_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    result = CliRunner().invoke(app, ["up"])
    assert isinstance(result.exception, InputError)
    assert result.exception.exit_code == 2
    assert "pip install 'draftlake[flows]'" in str(result.exception)


def test_a_port_held_by_something_else_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with (
            pytest.raises(InputError, match=f"port {port} is taken.*--port {port + 1}"),
            local_stack.local_stack(port, lake=None, logs=tmp_path, say=lambda _: None),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_the_stack_sends_no_telemetry_and_starts_no_second_server() -> None:
    settings = local_stack.stack_environment("http://127.0.0.1:4200/api", None)
    assert settings["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert settings["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] == "false"
    assert float(settings["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"]) >= 180
    assert "DRAFTLAKE_LAKE" not in settings


@pytest.mark.parametrize(
    ("lake", "expected"), [("lake", str(Path.cwd() / "lake")), ("s3://b/lake", "s3://b/lake")]
)
def test_the_worker_gets_a_lake_it_can_find_from_any_folder(lake: str, expected: str) -> None:
    assert local_stack.stack_environment("http://x/api", lake)["DRAFTLAKE_LAKE"] == expected


def test_a_service_that_stops_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("address already in use\n")
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"])
    process.wait()
    service = local_stack.Service(name="server", process=process, log=log)
    with pytest.raises(DraftlakeError, match=r"server stopped \(exit 5\)(.|\n)*address already in use"):
        service.require_alive()


def test_a_flow_that_cannot_be_imported_is_not_deployed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "prefect.yaml"
    broken.write_text("deployments: [{name: local, entrypoint: 'flows.nowhere:retrain'}]")
    monkeypatch.setattr(local_stack, "PREFECT_FILE", broken)
    with pytest.raises(ModuleNotFoundError):
        local_stack.deploy(dict(os.environ))


def test_the_zombie_automation_leaves_paused_runs_alone() -> None:
    trigger = local_stack._zombie_automation().trigger
    assert {
        "prefect.flow-run.Paused",
        "prefect.flow-run.Suspended",
        "prefect.flow-run.Completed",
    } <= trigger.expect


def test_sigterm_stops_the_stack_like_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        commands._interrupt(15, None)

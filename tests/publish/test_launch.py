"""Command lines a server is started with, and what happens when it does not come up."""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from features.errors import EngineError
from publish.launch import LocalServer, ServeCommand, serve_command
from publish.vllm_plugin.compat import ALLOW_UNTESTED, TABLE, internals_for
from publish.vllm_plugin.errors import EngineRefusedError
from publish.vllm_plugin.roots import ROOTS_VARIABLE, allowed_roots, checked_uri, joined_roots


def option(command: ServeCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_the_command_names_method_backend_extension_and_roots() -> None:
    command = serve_command(
        Path("/m/target"),
        Path("/m/dspark-draft"),
        port=8123,
        registry_roots=["/reg", "s3://b/r"],
        vllm_version="0.32.0",
    )
    assert json.loads(option(command, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/m/dspark-draft",
        "num_speculative_tokens": 3,
    }
    assert json.loads(option(command, "--weight-transfer-config")) == {"backend": "draftlake"}
    assert option(command, "--worker-extension-cls") == "publish.vllm_plugin.WorkerExtension"
    assert option(command, "--logprobs-mode") == "raw_logprobs"
    assert option(command, "--host") == "127.0.0.1"
    assert command.env[ROOTS_VARIABLE] == "/reg:s3://b/r"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.base_url == "http://127.0.0.1:8123"


def test_without_a_draft_no_speculation_is_asked_for() -> None:
    assert "--speculative-config" not in serve_command(Path("t"), None, port=1, vllm_version="0.32.0").argv


def test_cpu_settings_stay_off_a_gpu() -> None:
    cpu = serve_command(Path("t"), None, port=1, vllm_version="0.32.0", kv_cache_gib=2)
    gpu = serve_command(Path("t"), None, port=1, vllm_version="0.32.0", device="gpu")
    assert cpu.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert cpu.env["OMP_NUM_THREADS"] == "1"
    assert not any("CPU" in name or name.startswith("OMP") for name in gpu.env)


def test_each_release_gets_only_flags_it_knows() -> None:
    assert "--enable-scale-out" in serve_command(Path("t"), None, port=1, vllm_version="0.32.1").argv
    assert "--enable-scale-out" not in serve_command(Path("t"), None, port=1, vllm_version="0.26.0").argv


def test_a_release_that_was_never_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTESTED, raising=False)
    with pytest.raises(EngineError, match=r"vLLM 0.99.0 is not among .*0.26, 0.32"):
        serve_command(Path("t"), None, port=1, vllm_version="0.99.0")
    with pytest.raises(EngineRefusedError):
        internals_for("1.32.0")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    assert internals_for("0.99.0") is TABLE[max(TABLE)]


def test_the_installed_vllm_is_one_that_was_run() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from publish.vllm_plugin.compat import installed_release

    internals_for(installed_release())


def test_roots_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = ("/reg one", "s3://bucket/reg", "file:///other", "/last")
    monkeypatch.setenv(ROOTS_VARIABLE, joined_roots(roots))
    assert allowed_roots() == roots
    monkeypatch.setenv(ROOTS_VARIABLE, "")
    assert allowed_roots() == ()


@pytest.mark.parametrize(
    "uri",
    [
        "/reg2/artifact",
        "/reg/../etc",
        "s3://bucket/registry-2/a",
        "s3://bucket/reg/../other",
        "s3://other/reg/a",
        "s3://bucket/reg/%2e%2e/x",
        "http://bucket/reg/a",
        "reg/a",
    ],
)
def test_a_uri_outside_every_root_is_refused(uri: str) -> None:
    with pytest.raises(EngineRefusedError):
        checked_uri(uri, ("/reg", "s3://bucket/reg"))


def test_a_uri_under_a_root_is_taken_in_any_spelling(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert checked_uri(f"{root}/artifacts/a/", (root,)) == f"{root}/artifacts/a"
    assert checked_uri(f"file://{root}/artifacts/a", (root,)) == f"{root}/artifacts/a"
    assert checked_uri(f"{root}/a", (f"file://{root}/",)) == f"{root}/a"
    assert checked_uri("s3://bucket/reg/a/", ("s3://bucket/reg/",)) == "s3://bucket/reg/a"


def test_without_roots_nothing_may_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(EngineRefusedError, match="none are set"):
        checked_uri(str(tmp_path), ())


def script(tmp_path: Path, code: str, *, port: int = 1) -> LocalServer:
    command = serve_command(Path("t"), None, port=port, vllm_version="0.32.0")
    command = replace(command, argv=(sys.executable, "-c", code))
    return LocalServer(command, log_path=tmp_path / "server.log", ready_timeout_s=20)


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = script(tmp_path, "raise SystemExit('no such model: t')")
    with pytest.raises(EngineError, match=r"(?s)ended before it was ready.*no such model: t"):
        server.start()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_leaving_the_server_ends_its_children_too(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    server = script(tmp_path, FAKE.format(pids=str(pids), port=port), port=port)
    with pytest.raises(RuntimeError, match="body"), server:  # noqa: PT012
        found = [int(pid) for pid in pids.read_text().split()]
        assert server.start_seconds is not None
        assert all(alive(pid) for pid in found)
        raise RuntimeError("body")
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in found)
    server.stop()

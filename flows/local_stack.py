"""A Prefect server and a process worker on this machine, with the settings that make them work.

For one person and one machine. Several machines want a server of their own on PostgreSQL, with
``prefect.yaml`` deployed to it and workers started by whatever runs services there.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from features.errors import DraftlakeError, InputError
from flows.subprocess_step import tail
from pipelines.context import LAKE_VARIABLE
from publish.processes import start_bound, stop_group

logger = logging.getLogger(__name__)

POOL = "draftlake"
DEPLOYMENT = "retrain/local"
PREFECT_FILE = Path(__file__).with_name("prefect.yaml")
ZOMBIES = "draftlake: mark dead runs as crashed"

STARTUP_TIMEOUT_S = 180.0
"""A fresh home's database migrations took 45 s on two busy cores."""
_STOP_GRACE_S = 20.0
_PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")


@dataclass(frozen=True, slots=True)
class Service:
    """One long-running program of the stack."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def require_alive(self) -> None:
        """Raise when it has ended: a service never ends by itself."""
        code = self.process.poll()
        if code is not None:
            raise DraftlakeError(
                f"the Prefect {self.name} stopped (exit {code}); its last lines:\n{tail(self.log)}"
            )


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack: where it is and what it consists of."""

    api_url: str
    services: tuple[Service, ...]
    """Only what was started here: a server that ran already is used and left alone."""

    def require_alive(self) -> None:
        """Raise when a service has ended."""
        for service in self.services:
            service.require_alive()


def stack_environment(api_url: str, lake: str | None) -> dict[str, str]:
    """Settings of the server and the worker, on top of the caller's environment."""
    settings = {
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # No second server behind our back: its default start timeout is too short for a fresh home.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(STARTUP_TIMEOUT_S)),
        "PYTHONSAFEPATH": "1",
    }
    if lake is not None:
        # A run's working directory is not the caller's.
        settings[LAKE_VARIABLE] = lake if "://" in lake else str(Path(lake).resolve())
    return settings


@contextmanager
def local_stack(
    port: int, *, lake: str | None, logs: Path, say: Callable[[str], None]
) -> Iterator[LocalStack]:
    """Server, work pool, deployment and worker on ``port``, stopped on exit, worker first.

    Raises:
        InputError: something that is no Prefect server has the port.
        DraftlakeError: a part did not start; the message ends with its log.
    """
    api_url = f"http://127.0.0.1:{port}/api"
    environment = stack_environment(api_url, lake)
    logs.mkdir(parents=True, exist_ok=True)
    services: list[Service] = []
    try:
        if is_healthy(api_url):
            say(f"using the Prefect server that runs on port {port}")
        else:
            _require_free(port)
            say(f"starting a Prefect server on port {port} (up to a minute when its database is new)")
            command = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
            services.append(_start("server", command, environment, logs))
            _wait_healthy(api_url, services[0])
        say(f"deploying {PREFECT_FILE.name}")
        create_pool_and_automation(api_url)
        deploy(environment)
        name = f"draftlake-{os.getpid()}"
        command = ["worker", "start", "--pool", POOL, "--type", "process", "--name", name]
        services.append(_start("worker", command, environment, logs))
        wait_for_worker(api_url, name, services[-1])
        yield LocalStack(api_url=api_url, services=tuple(services))
    finally:
        for service in reversed(services):  # a worker without a server hangs
            stop_group(service.process, grace_s=_STOP_GRACE_S)


def is_healthy(api_url: str) -> bool:
    """True when a Prefect server answers there."""
    try:
        return httpx.get(f"{api_url}/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def create_pool_and_automation(api_url: str) -> None:
    """The process work pool, and the automation that ends runs whose process is gone; harmless again."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            logger.debug("work pool %s exists", POOL)
        if not client.read_automations_by_name(ZOMBIES):
            client.create_automation(_zombie_automation())


def deploy(environment: Mapping[str, str]) -> None:
    """Deploy ``prefect.yaml``.

    Raises:
        DraftlakeError: a flow cannot be imported, or Prefect refused.
    """
    import yaml
    from prefect.flows import load_flow_from_entrypoint

    for deployment in yaml.safe_load(PREFECT_FILE.read_text())["deployments"]:
        # Prefect deploys a placeholder, and says success, for a flow that cannot be imported.
        load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    command = ["deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    done = subprocess.run(
        [*_PREFECT, *command],
        env=os.environ | environment,
        cwd="/",  # Prefect puts it first on sys.path: see prefect.yaml
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DraftlakeError(f"`prefect deploy` exited with {done.returncode}:\n{done.stdout}{done.stderr}")


def wait_for_worker(
    api_url: str, name: str, worker: Service, *, timeout_s: float = STARTUP_TIMEOUT_S
) -> None:
    """Return once the worker polls its pool: before that, a run would only wait.

    Raises:
        DraftlakeError: it ended, or did not report in time.
    """

    def reports() -> bool:
        answer = httpx.post(f"{api_url}/work_pools/{POOL}/workers/filter", json={}, timeout=30)
        rows: list[dict[str, Any]] = json.loads(answer.text) if answer.is_success else []
        return any(row["name"] == name and row["status"] == "ONLINE" for row in rows)

    _wait(reports, worker, timeout_s)


def _start(name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path) -> Service:
    log = logs / f"{name}.log"
    with log.open("wb") as file:
        # SIGTERM, not SIGKILL: a worker that is asked to stop ends its runs.
        process = start_bound(
            [*_PREFECT, *command],
            stdout=file,
            stderr=file,
            death_signal=signal.SIGTERM,
            env=dict(environment),
        )
    return Service(name=name, process=process, log=log)


def _wait_healthy(api_url: str, server: Service) -> None:
    _wait(lambda: is_healthy(api_url), server, STARTUP_TIMEOUT_S)


def _wait(ready: Callable[[], bool], service: Service, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        service.require_alive()
        if time.monotonic() > deadline:
            raise DraftlakeError(
                f"the Prefect {service.name} was not ready after {timeout_s:.0f} s; "
                f"its last lines:\n{tail(service.log)}"
            )
        time.sleep(0.5)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"port {port} is taken by something that is no Prefect server ({error}). "
                f"Choose another: draftlake flows up --port {port + 1}"
            ) from error


def _zombie_automation() -> Any:
    """Crash a run that sent heartbeats and then neither another one nor a change of state."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ends = ("Completed", "Failed", "Cancelled", "Crashed")
    waits = ("Paused", "Suspended", "AwaitingRetry", "Scheduled")
    beat, message = "prefect.flow-run.heartbeat", "no heartbeat for 90 s: its process is gone"
    return AutomationCore(
        name=ZOMBIES,
        trigger=EventTrigger(
            after={beat},
            expect={beat, *(f"prefect.flow-run.{state}" for state in ends + waits)},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=90),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )

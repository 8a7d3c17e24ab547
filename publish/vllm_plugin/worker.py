"""Methods a publisher calls in every vLLM worker, through ``collective_rpc``.

vLLM mixes ``WorkerExtension`` into its worker class, so ``self`` is the worker. RPCs run on the
engine's own loop: whatever takes long (fetching, hashing a target) is started as a task on a
thread with ``draftlake_start`` and asked for with ``draftlake_poll``, and the engine keeps
decoding meanwhile. Every answer is a dict with ``ok``; refusals carry ``kind`` and ``message``.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from publish.vllm_plugin.backend import DraftlakeBackend, register
from publish.vllm_plugin.checkpoint import stage
from publish.vllm_plugin.compat import draft_model, installed_release, keep_cpu_weights, target_model
from publish.vllm_plugin.cpu_sampling import repair_cpu_sampling
from publish.vllm_plugin.errors import EngineRefusedError, PluginError
from publish.vllm_plugin.fingerprints import checkpoint_views, digests_of, fingerprint, owned_and_aliased
from publish.vllm_plugin.layout import LiveLayout
from publish.vllm_plugin.roots import allowed_roots

logger = logging.getLogger(__name__)

# vLLM resolves the extension class before it loads a model: the moment for all three.
register()
keep_cpu_weights()
repair_cpu_sampling()


class Tasks:
    """Background work of one worker, by ticket. One thread each; results are kept until asked for."""

    def __init__(self) -> None:
        self._results: dict[int, dict[str, Any] | None] = {}
        self._next = 0

    def start(self, work: Callable[[], dict[str, Any]]) -> int:
        """Run ``work`` on a thread; returns the ticket to poll with."""
        ticket = self._next = self._next + 1
        self._results[ticket] = None

        def run() -> None:
            self._results[ticket] = answered(work)

        threading.Thread(target=run, name=f"draftlake-{ticket}", daemon=True).start()
        return ticket

    def poll(self, ticket: int) -> dict[str, Any]:
        """``{"ok": True, "done": False}``, or the task's answer, which is then forgotten."""
        if ticket not in self._results:
            return refusal(
                EngineRefusedError(
                    f"no task {ticket} here: the engine was restarted, or it was asked for twice"
                )
            )
        result = self._results[ticket]
        if result is None:
            return {"ok": True, "done": False}
        del self._results[ticket]
        return result


def answered(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The dict that goes over RPC, refusals included. Unforeseen exceptions are reported as engine faults."""
    try:
        return {"ok": True, "done": True, **work()}
    except PluginError as error:
        return refusal(error)
    except Exception as error:  # crosses a process border, where vLLM would keep only the text
        logger.exception("draftlake call failed")
        return refusal(EngineRefusedError(f"{type(error).__name__}: {error}"))


def refusal(error: PluginError) -> dict[str, Any]:
    """An error as an answer."""
    return {"ok": False, "done": True, "kind": error.kind, "message": str(error)}


class WorkerExtension:
    """Mixed into vLLM's worker; every name starts with ``draftlake`` to stay clear of its own."""

    def draftlake_start(self, task: str, **kwargs: str) -> dict[str, Any]:
        """Start ``prepare`` (``uri``, ``digest``) or ``state`` in the background; answers with a ticket."""
        tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": self._draftlake_prepare,
            "state": self._draftlake_state,
        }
        if task not in tasks:
            return refusal(EngineRefusedError(f"no task {task!r}; there are {sorted(tasks)}"))
        return {"ok": True, "ticket": self._draftlake_tasks().start(lambda: tasks[task](**kwargs))}

    def draftlake_poll(self, ticket: int) -> dict[str, Any]:
        """Has that task ended, and with what?"""
        return self._draftlake_tasks().poll(int(ticket))

    def draftlake_brief(self) -> dict[str, Any]:
        """What is committed and staged, without reading a tensor: cheap enough to ask at any time."""

        def work() -> dict[str, Any]:
            backend, _ = self._draftlake_parts()
            return {
                "draft_artifact": backend.artifact,
                "prepared": backend.staged.digest if backend.staged else None,
                "revertible": backend.replaced is not None,
            }

        return answered(work)

    def draftlake_verify(self, digest: str) -> dict[str, Any]:
        """Read the live draft back and compare it, tensor by tensor, with what the artifact held."""

        def work() -> dict[str, Any]:
            backend, draft = self._draftlake_parts()
            if backend.artifact != digest:
                raise EngineRefusedError(
                    f"expected draft {digest}, this engine serves {backend.artifact or 'its boot draft'}"
                )
            with backend.lock:
                owned, _ = owned_and_aliased(draft, target_model(self))
                found = digests_of(owned)
            wrong = sorted(name for name in found if found[name] != backend.digests.get(name))
            if wrong:
                raise EngineRefusedError(
                    f"after the swap {len(wrong)} tensors differ from artifact {digest}: {wrong[:5]}"
                )
            return {"draft_fingerprint": self._draftlake_fingerprint(backend, found)}

        return answered(work)

    def _draftlake_tasks(self) -> Tasks:
        if not hasattr(self, "_draftlake_task_table"):
            self._draftlake_task_table = Tasks()
        return self._draftlake_task_table

    def _draftlake_parts(self) -> tuple[DraftlakeBackend, Any]:
        backend = getattr(self, "weight_transfer_engine", None)
        if not isinstance(backend, DraftlakeBackend):
            raise EngineRefusedError(
                f"this engine's weight-transfer backend is {type(backend).__name__}, expected draftlake. "
                f"""Start it with --weight-transfer-config '{{"backend": "draftlake"}}'."""
            )
        draft = draft_model(self)
        if draft is None:
            raise EngineRefusedError(
                "this engine has no draft model, so there is nothing to swap. Start it with "
                "--speculative-config naming method, draft folder and num_speculative_tokens."
            )
        world = self.vllm_config.parallel_config.world_size  # type: ignore[attr-defined]
        if world != 1:
            raise EngineRefusedError(
                f"this engine spreads its model over {world} workers; drafts are swapped into single-worker "
                f"engines only. Serve with tensor and pipeline parallelism 1."
            )
        return backend, draft

    def _draftlake_live(self) -> LiveLayout:
        backend, draft = self._draftlake_parts()
        owned, aliased = owned_and_aliased(draft, target_model(self))
        config = self.vllm_config  # type: ignore[attr-defined]
        return LiveLayout(
            method=str(config.speculative_config.method),
            shapes={name: tuple(view.shape) for name, view in owned.items()},
            dtypes={name: view.dtype for name, view in owned.items()},
            aliased=aliased,
            target_vocab=int(config.model_config.get_vocab_size()),
            config=backend.boot_config,
        )

    def _draftlake_prepare(self, uri: str, digest: str) -> dict[str, Any]:
        backend, _ = self._draftlake_parts()
        with backend.lock:
            live = self._draftlake_live()
        backend.staged = stage(uri, digest, roots=allowed_roots(), live=live)
        return {"prepared": digest}

    def _draftlake_state(self) -> dict[str, Any]:
        backend, draft = self._draftlake_parts()
        target, config = target_model(self), self.vllm_config  # type: ignore[attr-defined]
        with backend.lock:
            owned, aliased = owned_and_aliased(draft, target)
            draft_digests, target_digests = digests_of(owned), digests_of(checkpoint_views(target))
        return {
            "vllm_version": installed_release(),
            "method": str(config.speculative_config.method),
            "num_speculative_tokens": int(config.speculative_config.num_speculative_tokens),
            "draft_artifact": backend.artifact,
            "draft_fingerprint": self._draftlake_fingerprint(backend, draft_digests),
            "draft_tensors": sorted(backend.names.get(name, name) for name in owned),
            "target_fingerprint": fingerprint(target_digests),
            "aliased": list(aliased),
            "owns_lm_head": "lm_head.weight" in owned,
            "owns_embed_tokens": "embed_tokens.weight" in owned,
            "prepared": backend.staged.digest if backend.staged else None,
        }

    def _draftlake_fingerprint(self, backend: DraftlakeBackend, digests: dict[str, str]) -> str:
        return fingerprint({backend.names.get(name, name): digest for name, digest in digests.items()})

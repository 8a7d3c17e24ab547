"""The weight-transfer backend ``draftlake``: loads a staged artifact into the live draft.

vLLM opens a session (``start_draft_weight_update``), passes ``update_info`` to
``receive_weights`` and closes it. All loading happens in that one call, because a release
closes the session by itself when an update fails; the layers must not be left half open.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from publish.vllm_plugin import BACKEND_NAME
from publish.vllm_plugin.checkpoint import Staged, boot_config, boot_names
from publish.vllm_plugin.compat import installed_release, internals_for, reload_whole
from publish.vllm_plugin.errors import EngineRefusedError
from publish.vllm_plugin.fingerprints import canonical_name, digests_of, fingerprint, owned_and_aliased

logger = logging.getLogger(__name__)


@dataclass
class DraftlakeInitInfo(WeightTransferInitInfo):
    """Nothing to initialise: the engine pulls."""


@dataclass
class DraftlakeUpdateInfo(WeightTransferUpdateInfo):
    """What to load: the staged artifact by digest, or the draft replaced by the last commit."""

    digest: str = ""
    """Digest of the staged artifact; empty with ``revert``."""
    revert: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """The draft that a commit replaced, in host memory."""

    artifact: str | None
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    digests: Mapping[str, str]


class DraftlakeBackend(WeightTransferEngine[DraftlakeInitInfo, DraftlakeUpdateInfo]):
    """Loads what ``prepare`` staged; never writes a tensor that the draft does not own."""

    init_info_cls = DraftlakeInitInfo
    update_info_cls = DraftlakeUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.internals = internals_for(installed_release())
        self.lock = threading.Lock()
        """Held while live tensors are read for fingerprints or written by a load."""
        self.staged: Staged | None = None
        self.replaced: Replaced | None = None
        self.artifact: str | None = None
        """Digest last committed; None while the boot draft serves."""
        self.digests: Mapping[str, str] = {}
        """What the committed artifact's tensors digest to, by canonical name."""
        # Read now: the folder may be replaced while the engine runs.
        folder, loaded = self._boot_draft()
        self.boot_config = boot_config(folder, loaded)
        self.names: Mapping[str, str] = {canonical_name(name): name for name in boot_names(folder)}
        """Canonical -> file names of the live draft."""

    def init_transfer_engine(self, init_info: DraftlakeInitInfo) -> None:
        """No connection is kept."""

    def start_weight_update(self) -> None:
        """Refuse a session that would write the target.

        Raises:
            EngineRefusedError: the session is not a draft update.
        """
        if self.model is self._default_model:
            raise EngineRefusedError(
                "the draftlake backend updates drafts only and this session would write the target. "
                "Open it with start_draft_weight_update; sync the target through its own backend."
            )

    def receive_weights(self, update_info: DraftlakeUpdateInfo) -> None:
        """Load the staged artifact, or put the replaced draft back. On failure the old draft is put back.

        Raises:
            EngineRefusedError: nothing of that digest is staged, or the load failed.
        """
        with self.lock, torch.no_grad():
            if update_info.revert:
                self._revert()
            else:
                self._commit(update_info.digest)

    def finish_weight_update(self) -> None:
        """The session's work is done in ``receive_weights``."""

    def shutdown(self) -> None:
        """Nothing is held open."""
        self.staged = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        """Part of vLLM 0.26's interface: this backend has no sending side.

        Raises:
            EngineRefusedError: always.
        """
        raise EngineRefusedError(
            "engines pull drafts from the registry; publish an artifact instead of sending tensors"
        )

    def _boot_draft(self) -> tuple[str, Mapping[str, Any]]:
        drafter = getattr(self.vllm_config.speculative_config, "draft_model_config", None)
        return (str(drafter.model), drafter.hf_config.to_dict()) if drafter is not None else ("", {})

    def _commit(self, digest: str) -> None:
        staged = self.staged
        if staged is None or staged.digest != digest:
            raise EngineRefusedError(
                f"artifact {digest or '(none named)'} is not staged here; staged is "
                f"{staged.digest if staged else 'nothing'}. Call prepare for it first."
            )
        before = self._snapshot()
        try:
            self._load(staged.tensors)
        except Exception as error:
            logger.exception("loading draft %s failed; putting the old one back", digest)
            self._put_back(before)
            raise EngineRefusedError(
                f"loading draft {digest} failed ({error}); the draft before it serves again"
            ) from error
        self.artifact, self.names, self.digests = digest, staged.names, staged.digests
        self.replaced, self.staged = before, None

    def _revert(self) -> None:
        if self.replaced is None:
            raise EngineRefusedError(
                "this engine holds no replaced draft to put back: nothing was committed since it started, or it "
                "was put back already. Prepare and commit the wanted artifact instead."
            )
        before = self.replaced
        self._put_back(before)
        self.artifact, self.names, self.digests = before.artifact, before.names, before.digests
        self.replaced = None

    def _put_back(self, before: Replaced) -> None:
        self._load(before.tensors)
        owned, _ = owned_and_aliased(self.model, self._default_model)
        if digests_of(owned) != dict(before.digests):
            raise EngineRefusedError(
                f"the draft before the swap (fingerprint {fingerprint(before.digests)}) could not be put back; "
                f"this engine's draft is in an unknown state. Restart the engine."
            )

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        reload_whole(self.model, self.model_config, list(tensors.items()), self.internals)

    def _snapshot(self) -> Replaced:
        owned, _ = owned_and_aliased(self.model, self._default_model)
        copies = {name: view.detach().to("cpu", copy=True).contiguous() for name, view in owned.items()}
        return Replaced(self.artifact, copies, self.names, digests_of(copies))


def register() -> None:
    """Make the backend known to vLLM; harmless when done already."""
    if BACKEND_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND_NAME, DraftlakeBackend)

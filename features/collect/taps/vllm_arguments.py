"""How a vLLM engine is started that can be replayed on; imports no engine and no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from features.errors import InputError

CONNECTOR = "ReplayConnector"
CONNECTOR_MODULE = "features.collect.taps.vllm_connector"
EXTENSION = "features.collect.taps.vllm_worker.ReplayExtension"


def engine_arguments(target: str | Path, layer_ids: Sequence[int], *, num_layers: int) -> dict[str, Any]:
    """What ``vllm.LLM`` needs to be replayed on; add precision, memory and length to taste.

    Args:
        layer_ids: aux layer ids (blocks applied) that will be asked for; the last block's output,
            from which the final hidden state is derived, is added.
        num_layers: blocks of the target.

    Raises:
        InputError: a layer id is none of this target's.
    """
    outside = [k for k in layer_ids if not 0 <= k <= num_layers]
    if outside or not layer_ids:
        raise InputError(
            f"layer ids {list(layer_ids)} do not fit a target of {num_layers} blocks: a layer id is the number "
            f"of blocks applied, expected ids in [0, {num_layers}]"
        )
    return {
        "model": str(target),
        "enable_prefix_caching": False,
        "worker_extension_cls": EXTENSION,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({*layer_ids, num_layers})}
            },
        },
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_producer",
        },
    }

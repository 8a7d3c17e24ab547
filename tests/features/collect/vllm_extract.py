"""Extract hidden states with a real vLLM engine; run as a process of its own.

usage: vllm_extract.py MODEL_DIR OUT_DIR LAYER_IDS_JSON PROMPTS_JSON
Writes ``OUT_DIR/<i>.safetensors`` with ``hidden_states`` [T, m, H] and ``token_ids`` [T], and
``OUT_DIR/logprobs.json`` with the engine's own prompt logprobs.
"""

import json
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

STEPS_FOR_THE_WRITE = 20


def main() -> None:
    model, out = sys.argv[1], Path(sys.argv[2])
    layer_ids, prompts = json.loads(sys.argv[3]), json.loads(sys.argv[4])
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        kv_transfer_config={
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "vllm_cpu_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(out / "raw")},
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for _ in range(STEPS_FOR_THE_WRITE):
        llm.llm_engine.step()
        time.sleep(0.02)
    logprobs = []
    for index, output in enumerate(outputs):
        tensors = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
        save_file({name: t.contiguous() for name, t in tensors.items()}, out / f"{index}.safetensors")
        entries = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        logprobs.append([None if entry is None else entry[token].logprob for entry, token in entries])
    (out / "logprobs.json").write_text(json.dumps(logprobs))


if __name__ == "__main__":
    main()

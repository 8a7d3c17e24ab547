"""Run vLLM in a process of its own and write down its answers and counters (started by a test).

Usage: ``python engine_run.py REQUEST.json OUT.json``; one request at a time, greedy. A process of
its own, because vLLM walks every loaded module and trips over other libraries' lazy objects.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def counters(llm: Any) -> list[int]:
    """Rounds and accepted tokens so far."""
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    return [int(values.get(name) or 0) for name in names]


def main(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=request["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=128, max_num_seqs=1, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": request["draft"], "num_speculative_tokens": request["k"]},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=request["decoded"], ignore_eos=True, detokenize=False)
    before = counters(llm)
    answers = []
    for prompt in request["prompts"]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
    return {"answers": answers, "counted": [a - b for a, b in zip(counters(llm), before, strict=True)]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))

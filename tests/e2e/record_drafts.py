"""Run vLLM in this process and write down every draft it proposes (started by a test).

Usage: ``python record_drafts.py TARGET DRAFT K PROMPTS.json OUT.json``; one request at a time, greedy.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(target: str, draft: str, k: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": k},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    rounds: list[dict[str, Any]] = []
    propose = runner.drafter.propose

    def recording(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        rounds.append({"newest_token": int(kwargs["next_token_ids"][0]), "drafts": drafts[0].tolist()})
        return drafts

    runner.drafter.propose = recording
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    answers = []
    for prompt in prompts:
        rounds.clear()
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0].outputs[0]
        answers.append({"token_ids": list(output.token_ids), "rounds": list(rounds)})
    return answers


if __name__ == "__main__":
    answers = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(Path(sys.argv[4]).read_text()))
    Path(sys.argv[5]).write_text(json.dumps(answers))

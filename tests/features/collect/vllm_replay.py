"""Every scenario of the replay lane in one real vLLM engine; run as a process of its own.

usage: vllm_replay.py FOLDER [prefix]
Expects the checkpoints ``FOLDER/target`` and ``FOLDER/other``; makes lakes, ``rollouts.jsonl``,
``taps.npz`` and ``said.json`` (what each scenario gave or raised) beside them. With ``prefix``, runs
only with vLLM's prefix cache on, past the check that refuses it; ``prefix.json`` holds what came of it.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, EngineArgs, SamplingParams

from features.collect.replay import VLLM_TAP, replay_rollouts
from features.collect.report import CollectReport
from features.collect.rollouts import Rollout, write_rollouts
from features.collect.run import collect_rollouts
from features.collect.sampling import SamplingPolicy
from features.collect.taps import vllm_connector, vllm_worker
from features.collect.taps.vllm_arguments import engine_arguments
from features.collect.taps.vllm_connector import replay_faults
from features.collect.taps.vllm_engine import LocalLlm, ReplayEngine, forward_features
from features.errors import DraftlakeError
from features.heads import head_from_checkpoint
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, TargetIdentity
from features.testing import tiny_record

LAYERS, HIDDEN, VOCAB, LONGEST = 6, 64, 128, 96
IDS = (1, 3, 4)
CHUNK = 32
"""Tokens that the engine computes per step: longer sequences are prefilled in chunks."""
WINDOW = 16
TAP_LENGTHS = (5, CHUNK + 1, 70, LONGEST - 1)
IDENTITY = TargetIdentity(
    target_id="tiny", architecture="LlamaForCausalLM", hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB,
    tokenizer_digest="t" * 64, config_digest="c" * 64,
)  # fmt: skip


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        **engine_arguments(folder / "target", IDS, num_layers=LAYERS),
        "dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True, "skip_tokenizer_init": True,
    } | more  # fmt: skip


def sampled(llm: LLM, count: int) -> list[Rollout]:
    """Rollouts that this engine samples and scores, as an RL run would record them."""
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(3, VOCAB, n)] for n in rng.integers(4, 50, count)]
    # No seed of a request's own: the CPU engine cannot rewind one for a chunked prompt.
    params = SamplingParams(temperature=1.0, max_tokens=24, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    found = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        said = output.outputs[0]
        logprobs = [entry[token].logprob for entry, token in zip(said.logprobs, said.token_ids, strict=True)]
        rollout = Rollout(
            sample_id=f"s{i}", group_id=f"g{i}", token_ids=(*prompt, *said.token_ids), prompt_length=len(prompt),
            sampled_mask=(False,) * len(prompt) + (True,) * len(said.token_ids),
            logprobs=(None,) * len(prompt) + tuple(logprobs), logprob_kind="engine_raw", version=0,
        )  # fmt: skip
        found.append(rollout)
    return found


class Scenarios:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.llm = LLM(**settings(folder))
        self.engine = ReplayEngine(LocalLlm(self.llm), folder / "target")
        self.head = head_from_checkpoint(folder / "target")
        self.said: dict[str, Any] = {}
        self.rollouts = sampled(self.llm, 9)
        write_rollouts(folder / "rollouts.jsonl", self.rollouts)

    def replay(self, lake: str, rollouts: Sequence[Any], **changes: Any) -> CollectReport:
        given: dict[str, Any] = {
            "engine": self.engine, "head": self.head, "record": tiny_record(self.head.head_id, target=IDENTITY),
            "layer_ids": IDS, "dtype": FeatureDtype.FLOAT32, "policy": SamplingPolicy(max_tokens=WINDOW),
            "writer_id": "replay", "fragment_tokens": 48, "batch_tokens": 200,
        }  # fmt: skip
        return replay_rollouts(self.lake(lake), rollouts, **given | changes)

    def lake(self, name: str) -> Lake:
        return Lake.init(str(self.folder / name), IDENTITY)

    def note(self, name: str, act: Callable[[], Any]) -> None:
        try:
            result = act()
        except DraftlakeError as error:
            result = {"error": type(error).__name__, "message": str(error)}
        self.said[name] = asdict(result) if isinstance(result, CollectReport) else result

    @contextmanager
    def replaced(self, owner: Any, name: str, value: Any) -> Any:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield before
        finally:
            setattr(owner, name, before)

    def reload(self, name: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder / name)})

    def taps(self) -> None:
        rng = np.random.default_rng(2)
        prompts = [[int(t) for t in rng.integers(3, VOCAB, n)] for n in TAP_LENGTHS]
        rows = forward_features(self.engine, prompts, IDS)
        arrays = {
            f"{kind}{i}": pair[k] for i, pair in enumerate(rows) for k, kind in enumerate(("aux", "final"))
        }
        np.savez(self.folder / "taps.npz", **arrays, **{f"ids{i}": p for i, p in enumerate(prompts)})

    def collected(self) -> None:
        shifted = replace(
            self.rollouts[0], sample_id="shifted", logprobs=(*self.rollouts[0].logprobs[1:], None)
        )
        long = replace(
            self.rollouts[1], sample_id="long", group_id="long", prompt_length=1, logprobs=None,
            token_ids=(5,) * LONGEST, sampled_mask=(False,) + (True,) * (LONGEST - 1),
        )  # fmt: skip
        unversioned = replace(self.rollouts[1], sample_id="unversioned", version=None)
        torn = replace(self.rollouts[1], sample_id="torn", sampled_mask=(True,))
        line = Refusal("file", 3, "bad_json", "not JSON")
        everything = [*self.rollouts, shifted, long, unversioned, torn, line, self.rollouts[2]]
        self.note("collected", lambda: self.replay("lake", everything))
        self.note("again", lambda: self.replay("lake", everything))

    def through_the_tap(self) -> None:
        """The same with the collector outside of the engine, as a backfill runs it."""
        record = tiny_record(self.head.head_id, target=IDENTITY)
        self.note(
            "tap",
            lambda: collect_rollouts(
                self.lake("tap"), self.rollouts, model=self.engine, head=self.head, record=record, layer_ids=IDS,
                dtype=FeatureDtype.FLOAT32, policy=SamplingPolicy(max_tokens=WINDOW), writer_id="tap", tap=VLLM_TAP,
            ),
        )  # fmt: skip

    def states_never_stored(self) -> None:
        """vLLM skips the extractor for a batch that it thinks too long: old rows stay in the cache."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        prefill, calls = self.engine.prefill, []

        def skipping(sequences: Any) -> None:
            calls.append(len(sequences))
            skipped = len(calls) == 2  # the first is the aux probe's
            with self.replaced(
                runner,
                "_input_fits_in_drafter",
                (lambda _: False) if skipped else runner._input_fits_in_drafter,
            ):
                prefill(sequences)

        with self.replaced(self.engine, "prefill", skipping):
            self.note("never_stored", lambda: self.replay("never", self.rollouts, batch_tokens=200))
        self.said["never_stored_batches"] = calls

    def weights_change_on_the_way(self) -> None:
        prefill, calls = self.engine.prefill, []

        def syncing(sequences: Any) -> None:
            prefill(sequences)
            calls.append(len(sequences))
            if len(calls) == 3:
                self.reload("other")

        with self.replaced(self.engine, "prefill", syncing):
            self.note("changed", lambda: self.replay("changed", self.rollouts))
        self.said["changed_batches"] = calls
        self.note("still_changed", lambda: self.replay("changed", self.rollouts))
        self.reload("target")
        self.note("put_back", lambda: self.replay("changed", self.rollouts))

    def other_weights_than_the_checkpoints(self) -> None:
        other = self.folder / "other"
        engine, head = ReplayEngine(LocalLlm(self.llm), other), head_from_checkpoint(other)
        record = tiny_record(head.head_id, target=IDENTITY)
        self.note(
            "wrong", lambda: self.replay("wrong", self.rollouts, engine=engine, head=head, record=record)
        )

    def labelled_as_another_version(self) -> None:
        ask = self.llm.llm_engine
        before = ask.get_weight_version()
        ask.set_weight_version("v000000007")
        engine = ReplayEngine(LocalLlm(self.llm), self.folder / "target")
        self.note("label", lambda: self.replay("label", self.rollouts, engine=engine))
        self.note("old_label", lambda: self.replay("label", self.rollouts))
        ask.set_weight_version(before)

    def another_driver_takes_over(self) -> None:
        prefill, calls = self.engine.prefill, []

        def interrupted(sequences: Any) -> None:
            prefill(sequences)
            calls.append(len(sequences))
            if len(calls) == 3:
                with self.replaced(self.engine, "prefill", prefill):
                    self.note("second_driver", lambda: self.replay("second", self.rollouts[:2]))

        with self.replaced(self.engine, "prefill", interrupted):
            self.note("first_driver", lambda: self.replay("first", self.rollouts))

    def what_is_refused_at_the_start(self) -> None:
        for name, more in {"prefix": {"enable_prefix_caching": True}, "fine": {}}.items():
            config = EngineArgs(**settings(self.folder, **more)).create_engine_config()
            self.said[name] = replay_faults(config)
        self.note("absent_layer", lambda: self.replay("absent", self.rollouts, layer_ids=(2, 3)))


def with_a_prefix_cache(folder: Path) -> list[str]:
    """The same sequence twice: the second time its first blocks come from the cache."""
    for module in (vllm_connector, vllm_worker):
        module.replay_faults = lambda config: []
    llm = LLM(**settings(folder, enable_prefix_caching=True, block_size=CHUNK))
    engine = ReplayEngine(LocalLlm(llm), folder / "target")
    sequence = [int(t) for t in np.random.default_rng(3).integers(3, VOCAB, 80)]
    said = [str(forward_features(engine, [sequence], IDS)[0][1].shape)]
    try:
        forward_features(engine, [sequence], IDS)
    except DraftlakeError as error:
        said.append(str(error))
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["prefix"]:
        (folder / "prefix.json").write_text(json.dumps(with_a_prefix_cache(folder)))
        return
    run = Scenarios(folder)
    run.taps()
    run.collected()
    run.through_the_tap()
    run.states_never_stored()
    run.weights_change_on_the_way()
    run.other_weights_than_the_checkpoints()
    run.labelled_as_another_version()
    run.another_driver_takes_over()
    run.what_is_refused_at_the_start()
    (folder / "said.json").write_text(json.dumps(run.said))


if __name__ == "__main__":
    main()

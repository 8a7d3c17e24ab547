"""Collect from a transformers causal LM during a trainer's own forward.

::

    with tap(model, collector) as t:
        t.advance(version)  # after each weight update, on every rank of a sharded model
        with t.step(batch):
            out = model(input_ids=..., attention_mask=..., position_ids=...)

Only planned rows are gathered, on the device, by hooks on the decoder's blocks. Hooks take rows
while the decoder's forward runs and at no other time, so what gradient checkpointing computes
again in the backward is not collected again. Imports torch: reach this module by its dotted name only.

Shape legend: W = wanted rows, H = hidden size, m = aux layers.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from features.collect.live import LiveBatch, LiveCollector, LivePlan
from features.collect.live_batch import BatchLayout
from features.collect.taps.copies import HostCopies, SentRows
from features.collect.taps.hf_head import head_from_model
from features.collect.taps.hf_model import check_layer_ids, decoder_of, padded, stream_of
from features.collect.taps.hf_probe import Features, ProbeReport, probe_tap
from features.errors import InputError
from features.schema import FeatureDtype, TargetVersion, VersionRecord

log = logging.getLogger(__name__)

PROBE_TOKENS = 16
"""Length of the sequence that the aux probe runs, once per version."""


@contextmanager
def tap(model: Any, collector: LiveCollector) -> Iterator["LiveTap"]:
    """Hook the model while the block runs; see the module's docstring.

    Wrap and shard the model first (``fully_shard``, ``torch.compile``). A model that has run
    compiled already is compiled again at its next forward, with the hooks in it.

    Raises:
        InputError: the model has no decoder that this tap reads, or the layer ids do not fit it.
    """
    live = LiveTap(model, collector)
    try:
        yield live
    finally:
        live.close()


class LiveTap:
    """Hooks on one model; made by :func:`tap`."""

    def __init__(self, model: Any, collector: LiveCollector) -> None:
        self._model, self._collector = model, collector
        self._decoder = decoder_of(model)
        ids = check_layer_ids(collector.layout.layer_ids, num_layers=len(self._decoder.layers))
        dtype = torch.bfloat16 if collector.layout.dtype is FeatureDtype.BFLOAT16 else torch.float32
        self._rows = _RowHooks(self._decoder, ids, dtype)
        if is_compiled(model):
            # Compiled code does not look for hooks that came after it; it must be made again.
            torch.compiler.reset()

    def close(self) -> None:
        """Remove the hooks."""
        self._rows.close()

    def advance(self, version: int) -> ProbeReport | None:
        """The model's weights are now ``version``: take its head, prove the layer ids, tell the collector.

        Call it on every rank of a sharded model, outside of ``step``; costs a few forwards of 16
        tokens. None: the version has not changed.

        Raises:
            ProofFailedError: the hooks do not read what the layer ids say; nothing is collected.
            InputError: the version is below the one before it.
        """
        if self._collector.version == TargetVersion(version):
            return None
        target = self._collector.lake.target
        ids = [int(t) for t in np.random.default_rng(0).integers(0, target.vocab_size, PROBE_TOKENS)]
        device = self._decoder.get_input_embeddings().weight.device.type
        # Eager: the probe's short forwards would each be compiled, and its own hooks not looked for.
        eager = torch.compiler.set_stance("force_eager") if is_compiled(self._model) else nullcontext()
        with eager, torch.autocast(device, enabled=False):
            report = probe_tap(self._model, self._rows.layer_ids, ids, tap=self._probe_rows)
        head = head_from_model(self._model)
        record = VersionRecord(
            version=TargetVersion(version), target_id=target.target_id, config_digest=target.config_digest,
            tokenizer_digest=target.tokenizer_digest, hidden_size=head.hidden_size, vocab_size=head.vocab_size,
            head_id=head.head_id, weights_digest=None,
        )  # fmt: skip
        self._collector.advance(record, head)
        return report

    @contextmanager
    def step(self, batch: LiveBatch) -> Iterator[LivePlan]:
        """Around one forward of the model over ``batch``; one forward, so one step for each micro-batch.

        When the block raises, its plan is abandoned. Nothing is waited for on leaving.

        Raises:
            InputError: the block ran no forward that the hooks saw, more than one, or one over a
                batch of another size than ``batch``.
        """
        plan = self._collector.plan(batch)
        if not plan:
            yield plan
            return
        positions = np.concatenate([np.arange(s.start, s.stop) for _, spans in plan.pieces for s in spans])
        sizes = [sum(s.num_rows for s in spans) for _, spans in plan.pieces]
        tokens = [np.asarray(r.token_ids[s.start : s.stop]) for r, spans in plan.pieces for s in spans]
        try:
            with self._rows.armed(plan.index, plan.layout):
                yield plan
            sent = self._rows.sent(np.concatenate(tokens), positions, np.repeat(np.arange(len(sizes)), sizes))
        except BaseException:
            self._collector.abandon(plan)
            raise
        self._collector.offer(plan, sent)

    def _probe_rows(
        self, model: Any, token_ids: Sequence[Sequence[int]], _layer_ids: Sequence[int]
    ) -> list[Features]:
        """The hooks' rows of whole sequences, in float32."""
        (sequence,) = token_ids
        layout = BatchLayout.right_padded([len(sequence)], width=len(sequence))
        with self._rows.armed(np.arange(len(sequence)), layout, dtype=torch.float32):
            model(**padded(self._decoder, token_ids), use_cache=False)
        aux, final, *_ = self._rows.take_tensors()
        return [(aux.cpu().numpy(), final.cpu().numpy())]


class _RowHooks:
    """Hooks that gather planned rows while the decoder's forward runs."""

    def __init__(self, decoder: Any, layer_ids: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layer_ids, self._dtype = layer_ids, dtype
        self._decoder, self._num_layers = decoder, len(decoder.layers)
        self._plan: tuple[Tensor, BatchLayout, torch.dtype] | None = None
        self._running = self._share_row = False
        self._forwards = 0
        self._streams: dict[int, Tensor] = {}
        self._final: Tensor | None = None
        self._inputs: dict[str, Tensor] = {}
        self._copies: HostCopies | None = None
        self._copied: Any = None
        self._handles = [
            decoder.register_forward_pre_hook(_eager(self._begin), with_kwargs=True),
            decoder.register_forward_hook(_eager(self._end)),
            *(self._hook(k) for k in layer_ids),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def armed(
        self, index: NDArray[np.int64], layout: BatchLayout, *, dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """Take rows ``index`` of the one forward that the block runs."""
        device = self._decoder.get_input_embeddings().weight.device
        rows = torch.from_numpy(index)
        if device.type != "cpu":
            rows = rows.pin_memory().to(device, non_blocking=True)
        self._plan, self._forwards = (rows, layout, dtype or self._dtype), 0
        self._share_row = layout.share_row
        self._streams, self._final, self._inputs, self._copied = {}, None, {}, None
        try:
            yield
        finally:
            self._plan, self._running = None, False
        missing = [str(k) for k in self.layer_ids if k not in self._streams]
        if self._forwards != 1 or self._final is None or missing:
            raise InputError(
                f"the step ran {self._forwards} forwards of {type(self._decoder).__name__} that hooks saw, expected "
                f"one with layer ids {list(self.layer_ids)}; missing: {', '.join(missing) or 'none'}. A model that "
                f"is compiled after the tap was opened, or compiled with fullgraph=True, runs without hooks: compile "
                f"it first, without fullgraph. Each micro-batch is a step of its own."
            )

    def take_tensors(self) -> tuple[Tensor, ...]:
        """``aux [W, m * H]``, ``final [W, H]`` and what is known of the inputs' rows; forgotten here."""
        assert self._final is not None
        aux = torch.cat([self._streams[k] for k in self.layer_ids], dim=-1)
        taken = (aux, self._final, *self._inputs.values())
        self._streams, self._final = {}, None
        return taken

    def sent(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], sequence: NDArray[np.int64]
    ) -> SentRows:
        """The rows of the last armed forward, on their way to the host."""
        return SentRows(
            self._copied, token_ids, positions, sequence, has_tokens="input_ids" in self._inputs,
            has_positions="position_ids" in self._inputs, positions_restart=self._share_row,
        )  # fmt: skip

    def _hook(self, k: int) -> Any:
        if k < self._num_layers:

            def take_input(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._take(k, args[0] if args else kwargs["hidden_states"])

            return self._decoder.layers[k].register_forward_pre_hook(_eager(take_input), with_kwargs=True)

        def take_output(_block: nn.Module, _args: Any, output: Any) -> None:
            self._take(k, stream_of(output))

        return self._decoder.layers[-1].register_forward_hook(_eager(take_output))

    def _begin(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._plan is None:
            return
        self._forwards, self._running = self._forwards + 1, True
        rows, layout, _ = self._plan
        named = {
            "input_ids": args[0] if args else kwargs.get("input_ids"),
            "position_ids": kwargs.get("position_ids"),
        }
        given = {name: value for name, value in named.items() if value is not None}
        if layout.share_row and "position_ids" not in given:
            raise InputError(
                f"{len(layout.lengths)} sequences are packed into one row and the forward has no position_ids: "
                f"they would attend to each other. Give position_ids that restart at each sequence."
            )
        for name, value in given.items():
            if value.numel() == layout.num_rows:
                self._inputs[name] = value.detach().reshape(-1).index_select(0, rows)

    def _take(self, k: int, stream: Tensor) -> None:
        if self._running:
            self._streams[k] = self._gathered(stream)

    def _gathered(self, stream: Tensor) -> Tensor:
        assert self._plan is not None
        rows, layout, dtype = self._plan
        flat = stream.detach().reshape(-1, stream.shape[-1])
        if len(flat) != layout.num_rows:
            raise InputError(
                f"the forward runs over {list(stream.shape[:-1])} = {len(flat)} rows, the step's batch has "
                f"{layout.num_rows}: give the collector the batch that the model is given, padding included"
            )
        return flat.index_select(0, rows).to(dtype)

    def _end(self, _decoder: nn.Module, _args: Any, output: Any) -> None:
        if not self._running:
            return
        self._running = False
        self._final = self._gathered(output.last_hidden_state)
        if len(self._streams) < len(self.layer_ids):
            return  # told when the step ends
        device = self._final.device
        self._copies = self._copies or HostCopies(device)
        aux = torch.cat([self._streams[k] for k in self.layer_ids], dim=-1)
        self._copied = self._copies.send((aux, self._final, *self._inputs.values()))


def is_compiled(model: Any) -> bool:
    """Whether the model, or a part of it, runs as compiled code."""
    return hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook out of compiled graphs: it changes Python state, and must run at each forward."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)
    return disabled

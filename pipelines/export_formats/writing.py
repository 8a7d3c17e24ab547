"""Windows into the files of one trainer's format: created once, counted, and nothing invented."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from features.bfloat16 import Stored, to_float32
from features.errors import ObjectExistsError
from features.storage import Store
from features.windows import Window
from pipelines.export_formats.final_norm import FinalNorm
from pipelines.export_formats.samples import Sample, TokenSample, TrainerFormat
from training.spec import MaskName


@dataclass(frozen=True, slots=True)
class Shape:
    """What every exported sequence has in common."""

    trainer: TrainerFormat
    layer_ids: tuple[int, ...]
    mask: MaskName
    norm_input_layer: int | None
    """The aux layer that is the final norm's input, for a trainer that applies the norm."""
    norm: FinalNorm | None
    """The norm to undo, where the trainer applies it and no such layer is stored."""


@dataclass(slots=True)
class Written:
    """What went into the folder, counted."""

    exported: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    cut_sequences: int = 0
    without_context: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    nbytes: int = 0
    files: int = 0
    files_present: int = 0
    final_error: float | None = None
    """Of a row, relative L2, after the norm that the trainer applies; None for one that applies none."""


class SampleWriter:
    """Writes sequences in the order they come; the n-th that can be used gets number n."""

    def __init__(self, store: Store, shape: Shape) -> None:
        self._store = store
        self._shape = shape
        self._tokens: list[TokenSample] = []
        self._token_files: list[str] = []
        self.written = Written()

    def add(self, window: Window) -> None:
        """Write a window, or count why this trainer cannot use it.

        Raises:
            ProofFailedError: the final norm does not lead back to what is stored.
        """
        sample = self._sample(window)
        if isinstance(sample, str):
            self.written.left_out[sample] = self.written.left_out.get(sample, 0) + 1
            return
        written, trainer = self.written, self._shape.trainer
        self._create(trainer.path(written.exported), trainer.encode(sample))
        written.exported += 1
        written.tokens += len(sample.mask)
        written.supervised_tokens += int(sample.mask.sum())
        written.cut_sequences += window.stop < window.meta.sequence_length
        written.without_context += window.meta.start > 0
        if trainer.token_files is not None:
            self._tokens.append(TokenSample(sample.token_ids, sample.mask))
            if len(self._tokens) == trainer.token_files.samples_per_file:
                self._write_tokens()

    def finish(self, digest: str) -> Written:
        """Write what comes after the sequences; the counts."""
        files = self._shape.trainer.token_files
        if files is not None and self.written.exported:
            if self._tokens:
                self._write_tokens()
            for path, data in files.closing(self._token_files, digest=digest):
                self._create(path, data)
        return self.written

    def _write_tokens(self) -> None:
        files = self._shape.trainer.token_files
        assert files is not None, "only a format with such files collects tokens"
        path, data = files.encode(len(self._token_files), self._tokens)
        self._create(path, data)
        self._token_files.append(path)
        self._tokens = []

    def _create(self, path: str, data: bytes) -> None:
        self.written.files += 1
        self.written.nbytes += len(data)
        # Created whole or not at all, and by this very plan: what is there is what would be written.
        self.written.files_present += self._store.exists(path)
        with suppress(ObjectExistsError):
            self._store.create(path, data)

    def _sample(self, window: Window) -> Sample | str:
        """The sequence of a window, or the reason why there is none."""
        chosen = window.sampled_mask if self._shape.mask == "sampled" else window.loss_mask
        if chosen is None:
            return "no_loss_mask"
        mask = chosen[:-1]  # The token after the last row has no features, so no place in these formats.
        refusal = self._shape.trainer.refusal(mask)
        if refusal is not None:
            return refusal
        aux = self._layers(window, self._shape.layer_ids)
        dtype = window.layout.dtype
        if not all(np.isfinite(to_float32(part, dtype)).all() for part in (aux, window.final)):
            return "not_finite"
        token_ids = window.token_ids[:-1].astype(np.int64)
        return Sample(token_ids, mask, aux, self._last(window), dtype, len(self._shape.layer_ids))

    def _last(self, window: Window) -> Stored:
        if self._shape.norm_input_layer is not None:
            self.written.final_error = 0.0
            return self._layers(window, (self._shape.norm_input_layer,))
        if self._shape.norm is None:
            return window.final
        where = f"sample {window.meta.sample_id!r} at position {window.meta.start}"
        rows, error = self._shape.norm.undo(window.final, window.layout.dtype, where=where)
        self.written.final_error = max(self.written.final_error or 0.0, error)
        return rows

    def _layers(self, window: Window, layer_ids: Sequence[int]) -> Stored:
        recorded, hidden = window.layout.layer_ids, window.layout.hidden_size
        if tuple(layer_ids) == recorded:
            return window.aux
        layers: Any = window.aux.reshape(window.num_rows, len(recorded), hidden)
        columns = [recorded.index(layer_id) for layer_id in layer_ids]
        picked: Stored = np.ascontiguousarray(layers[:, columns].reshape(window.num_rows, -1))
        return picked

"""The offline data of vllm-project/speculators, as release 0.9.0 reads it.

``data_path/`` is a saved Arrow data set with ``input_ids``, ``loss_mask`` and ``seq_len``; row i has its
features in ``hidden_states/hs_i.safetensors``: ``token_ids [T]`` and ``hidden_states [T, m + 1, H]``, the aux
layers first and what the final norm is given last. The mask says of each token whether it is supervised; the
trainer shifts. Layer ids count blocks applied, as ours do.
"""

import io
import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from features.checkpoint import RawTensor, write_safetensors
from features.schema import FeatureDtype
from pipelines.export_formats.samples import Sample, TokenSample

_COLUMNS = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
    ]
)
_SAFETENSORS_NAME = {FeatureDtype.BFLOAT16: "BF16", FeatureDtype.FLOAT32: "F32"}


class ArrowFiles:
    """A data set as the ``datasets`` package saves it; see ``TokenFiles``."""

    samples_per_file = 4096
    num_closing = 2

    def encode(self, number: int, samples: Sequence[TokenSample]) -> tuple[str, bytes]:
        table = pa.table(
            {
                "input_ids": pa.array([s.token_ids for s in samples], _COLUMNS.field("input_ids").type),
                "loss_mask": pa.array(
                    [s.mask.astype(np.int64) for s in samples], _COLUMNS.field("loss_mask").type
                ),
                "seq_len": pa.array([len(s.token_ids) for s in samples], pa.int64()),
            },
            schema=_COLUMNS,
        )
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return f"data-{number:05d}.arrow", sink.getvalue()

    def closing(self, paths: Sequence[str], *, digest: str) -> Sequence[tuple[str, bytes]]:
        integers = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}
        info = {
            "citation": "",
            "description": "",
            "features": {
                "input_ids": integers,
                "loss_mask": integers,
                "seq_len": {"dtype": "int64", "_type": "Value"},
            },
            "homepage": "",
            "license": "",
        }
        state = {
            "_data_files": [{"filename": name} for name in paths],
            "_fingerprint": digest[:16],
            "_format_columns": _COLUMNS.names,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        return [("dataset_info.json", _json(info)), ("state.json", _json(state))]


class SpeculatorsFormat:
    """See ``TrainerFormat``."""

    name = "speculators"
    before_final_norm = True
    token_files = ArrowFiles()

    def layer_names(self, layer_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer_ids)

    def refusal(self, mask: NDArray[np.bool_]) -> str | None:
        return None if mask.any() else "nothing_supervised"

    def path(self, index: int) -> str:
        return f"hidden_states/hs_{index}.safetensors"

    def encode(self, sample: Sample) -> bytes:
        layers = sample.aux.reshape(len(sample.last), sample.num_layers, -1)
        stacked = np.concatenate([layers, sample.last[:, None]], axis=1)
        # In order of name: the wide ids follow, aligned for any hidden size that is a multiple of four.
        tensors = {
            "hidden_states": _raw(stacked, _SAFETENSORS_NAME[sample.dtype]),
            "token_ids": _raw(sample.token_ids, "I64"),
        }
        return write_safetensors(tensors, {"format": "pt"})


def _raw(array: NDArray[np.generic], dtype: str) -> RawTensor:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return RawTensor(dtype, array.shape, little.tobytes())


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"

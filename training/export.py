"""Writing a draft folder: staged beside its place, then moved there in one rename."""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from features.errors import InputError
from training.artifact import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    DraftArtifact,
    TrainingManifest,
    load_artifact,
)
from training.methods import DraftMethod
from training.spec import DtypeName

METRICS_FILE = "metrics.jsonl"
"""One line per step; part of the folder, not of the digest."""


class Staging:
    """A draft folder in the making."""

    def __init__(self, out: Path) -> None:
        """Refuse at once, before any training, when ``out`` is taken."""
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(
                f"{out} exists and is not an empty folder; drafts are never overwritten: name another"
            )
        self._out = out
        self._folder = out.with_name(out.name + ".partial")
        self._lock: int | None = None

    def open(self) -> None:
        """Start afresh: what a killed run left behind is removed.

        Raises:
            InputError: a run that is alive writes to the same place.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # On the folder itself: the kernel lets go of it when the run ends, however it ends.
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(self._lock), os.stat(self._folder))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            self.close()
            raise InputError(
                f"another training run is writing {self._out} now; name another folder, or wait for it to end"
            )
        for entry in self._folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def close(self) -> None:
        """Let go of the folder; harmless when that was done."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append_metrics(self, record: Mapping[str, float]) -> None:
        """Add one step's line."""
        with (self._folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps(dict(record), sort_keys=True) + "\n")

    def write(
        self, method: DraftMethod, model: nn.Module, manifest: TrainingManifest, *, save_dtype: DtypeName
    ) -> None:
        """Write weights, config and manifest."""
        write_draft(self._folder, method, model, manifest, save_dtype=save_dtype)

    def publish(self) -> None:
        """Move the finished folder to its place."""
        if self._out.exists():
            self._out.rmdir()
        os.rename(self._folder, self._out)
        self.close()

    def load(self) -> DraftArtifact:
        """The artifact as written, read back and checked."""
        return load_artifact(self._out)


def write_draft(
    folder: Path, method: DraftMethod, model: nn.Module, manifest: TrainingManifest, *, save_dtype: DtypeName
) -> None:
    """Write the three files of an artifact into an existing folder."""
    dtype = torch.bfloat16 if save_dtype == "bfloat16" else torch.float32
    tensors = {name: _saved(tensor, dtype) for name, tensor in method.export_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = method.export_config(model)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")


def _saved(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return converted.cpu().contiguous()

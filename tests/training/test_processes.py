"""Two processes train what one process trains on the same windows."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from training.loop import TrainResult, train_draft
from training.spec import Eagle3Spec, TrainSpec
from training.testing import TARGET_CONFIG, ToyLake, make_window

pytestmark = pytest.mark.slow

COUNT, LENGTH, EPOCHS = 8, 12, 3


def _train(out: Path, batch_tokens: int) -> TrainResult:
    windows = [make_window(f"s{i}", length=LENGTH, prompt=2 + i % 6, seed=i) for i in range(COUNT)]
    windows[-1].aux[3, 0] = np.nan  # read by one process only, and another one each epoch
    lake = ToyLake(windows)
    spec = TrainSpec(
        method=Eagle3Spec(ttt_steps=2), epochs=EPOCHS, batch_tokens=batch_tokens, save_dtype="float32",
        learning_rate=1e-3,
    )  # fmt: skip
    return train_draft(lake, lake.select(), spec, out=out, target_config=TARGET_CONFIG)


def test_two_processes_equal_one_with_the_batches_joined(tmp_path: Path) -> None:
    one = _train(tmp_path / "one", COUNT * LENGTH)
    alone = load_file(one.folder / "model.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = (
        "import importlib.util, json, os, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('parts', sys.argv[1])\n"
        "parts = importlib.util.module_from_spec(spec); spec.loader.exec_module(parts)\n"
        "counts = parts._train(pathlib.Path(sys.argv[2]), int(sys.argv[3])).counts\n"
        "pathlib.Path(sys.argv[2] + '.counts-' + os.environ['RANK']).write_text(json.dumps(counts))\n"
    )
    command = [sys.executable, "-c", code, __file__, str(tmp_path / "two"), str(COUNT * LENGTH // 2)]
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    children = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        assert [child.wait(timeout=120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    counted = [json.loads((tmp_path / f"two.counts-{rank}").read_text()) for rank in range(2)]
    assert counted == [one.counts, one.counts]
    assert one.counts["nonfinite_features"] == 1
    together = load_file(tmp_path / "two" / "model.safetensors")
    assert together.keys() == alone.keys()
    for name, tensor in together.items():
        # Gradients are summed in another order; Adam's first steps turn that into up to a learning rate's worth
        # where a gradient is all but zero, so the mean over the tensor is compared.
        assert float((tensor - alone[name]).abs().mean()) < 2e-5, name

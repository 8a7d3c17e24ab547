"""The live tap on an accelerator: rows copied beside the computation are the planned ones, whatever runs meanwhile."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs an accelerator", allow_module_level=True)

from live_models import IDENTITY, IDS, LAYERS, LAYOUT, lay_out, make_model, sequences, stored_windows  # noqa: E402

from features.collect.live import LiveCollector  # noqa: E402
from features.collect.proofs import LogprobTolerance  # noqa: E402
from features.collect.sampling import SamplingPolicy  # noqa: E402
from features.collect.taps import hf_live  # noqa: E402
from features.lake import Lake  # noqa: E402
from features.schema import FeatureDtype  # noqa: E402

pytestmark = pytest.mark.gpu
STEPS = 20


def test_rows_survive_whatever_the_device_does_after_the_forward(tmp_path: Path) -> None:
    model = make_model()
    plains = [sequences(model, (30, 9, 21), seed=step) for step in range(STEPS)]
    lake = Lake.init(str(tmp_path / "lake"), IDENTITY)
    live = LiveCollector(
        lake, layout=LAYOUT, policy=SamplingPolicy(max_tokens=12), writer_id="gpu",
        tolerance=LogprobTolerance.for_compute_dtype(FeatureDtype.FLOAT32),
    )  # fmt: skip
    model.cuda()
    churn = torch.randn(4096, 4096, device="cuda")
    with hf_live.tap(model, live) as t:
        t.advance(0)
        for step, some in enumerate(plains):
            batch, inputs = lay_out(some, ("right", "left", "packed")[step % 3], first=3 * step)
            with t.step(batch):
                model(**{name: value.cuda() for name, value in inputs.items()}, use_cache=False)
            for _ in range(10):  # the compute stream stays busy, and freed memory is used again at once
                churn = (churn @ churn).tanh()
    report = live.close()
    assert report.verified == report.windows == 3 * STEPS
    windows = stored_windows(lake)
    for n, plain in enumerate(p for some in plains for p in some):
        window = windows[f"s{n}"]
        rows = slice(window.meta.start, window.stop)
        for k, found in zip(IDS, np.split(window.aux, len(IDS), axis=1), strict=True):
            if k < LAYERS:
                np.testing.assert_allclose(found, plain.states[k][rows], atol=1e-3)  # CPU against GPU kernels
        np.testing.assert_allclose(window.final, plain.states[-1][rows], atol=1e-3)

"""``bench lake --device``: a lake's windows into an accelerator's memory, beside the bare copy of as many bytes.

Needs no catalog, so that it also runs where only a trainer's packages are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from features.errors import InputError
from pipelines.bench.measure import interleaved
from pipelines.bench.subjects import Shape, make_lake

if TYPE_CHECKING:
    import torch

    from features.lake import Lake
    from features.selection import Selection

SHAPE = Shape(4096, 32, 8)
"""512 MiB in windows of 16 MiB."""


def bench_device(folder: Path, *, shape: Shape = SHAPE, rounds: int = 5) -> dict[str, Any]:
    """GB/s of features that arrive on the accelerator, page cache hot; every pass waits for its last copy.

    Args:
        folder: where the scratch lake goes.
        shape: windows of it.
        rounds: interleaved rounds; the median counts.

    Raises:
        InputError: PyTorch sees no accelerator.
    """
    import torch

    from training.testing import selection_of

    if not torch.accelerator.is_available():
        raise InputError(
            "--device measures copies to an accelerator, and PyTorch sees none here. Leave it out."
        )
    device = torch.accelerator.current_accelerator()
    assert device is not None
    lake = make_lake(str(folder / "device-lake"), shape)
    selection = selection_of(lake, lake.commit_paths())
    nbytes = shape.windows * shape.window_bytes
    subjects = {
        "copy_pinned": _bare_copy(nbytes, device, pin=True),
        "copy_pageable": _bare_copy(nbytes, device, pin=False),
        "read_pinned_async": _read(lake, selection, device, pin=True),
        "read_pageable": _read(lake, selection, device, pin=False),
    }
    speeds = interleaved(subjects, nbytes=nbytes, rounds=rounds)
    return {
        "read_over_copy": speeds["read_pinned_async"].over(speeds["copy_pinned"]),
        "pinned_over_pageable": speeds["read_pinned_async"].over(speeds["read_pageable"]),
        "device": torch.get_device_module(device).get_device_name(device),
        "nbytes": nbytes,
        "speeds": {
            name: {
                "median_gb_per_s": speed.median_gb_per_s,
                "cpu_s_per_gb": speed.cpu_s_per_gb,
                "gb_per_s": list(speed.gb_per_s),
            }
            for name, speed in speeds.items()
        },
    }


def _bare_copy(nbytes: int, device: "torch.device", *, pin: bool) -> Callable[[], object]:
    import torch

    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)

    return copy


def _read(lake: "Lake", selection: "Selection", device: "torch.device", *, pin: bool) -> Callable[[], object]:
    import torch

    from training.reading.reader import SelectionReader
    from training.reading.spec import ReadSpec
    from training.reading.transfer import DeviceCopies, pinned

    how = ReadSpec(order="random", batch_rows=1)
    reader = SelectionReader(lake, selection, how, allocate=pinned if pin else None)
    copies = DeviceCopies(device)

    def read_all() -> None:
        for step in reader.read():
            for window in step.windows:
                copies.copy((window.aux, window.final))
        torch.accelerator.synchronize(device)
        copies.release()

    return read_all

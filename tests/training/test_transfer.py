"""From page-locked slabs to an accelerator: bit for bit, and no slab is filled again under a copy."""

import gc
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from features.bfloat16 import float32_to_bf16
from features.lake import Lake
from features.schema import FeatureDtype
from features.selection import Selection
from features.testing import register_tiny_version
from features.windows import Window
from features.writer import write_fragment
from training.feed import Feed
from training.reading.dataset import WindowDataset, window_loader
from training.reading.reader import SelectionReader
from training.reading.slabs import SlabPool
from training.reading.spec import Position, ReadSpec
from training.reading.transfer import DeviceCopies, pinned
from training.testing import LAYERS, TARGET, ToyLake, make_head, make_window, selection_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]

DTYPES = pytest.mark.parametrize("dtype", list(FeatureDtype))
SPEC = ReadSpec(batch_rows=96, order="random", read_ahead_bytes=1)


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def windows(dtype: FeatureDtype, count: int = 24) -> list[Window]:
    made = [make_window(f"s{i}", length=20 + i, prompt=4, seed=i) for i in range(count)]
    if dtype is FeatureDtype.FLOAT32:
        return made
    return [
        replace(
            window, layout=replace(window.layout, dtype=dtype), aux=float32_to_bf16(window.aux),
            final=float32_to_bf16(window.final),
        )
        for window in made
    ]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@DTYPES
def test_windows_in_page_locked_memory_are_bit_equal_after_an_asynchronous_copy(
    device: torch.device, dtype: FeatureDtype
) -> None:
    """Slabs are used again while copies are under way: three epochs through about two steps of memory."""
    lake = ToyLake(windows(dtype))
    selection = lake.select()
    reader, copies = SelectionReader(lake, selection, SPEC, allocate=pinned), DeviceCopies(device)
    copied: list[tuple[int, list[torch.Tensor]]] = []
    for epoch in range(3):
        for step in reader.read(Position(epoch)):
            for index, window in zip(step.indices, step.windows, strict=True):
                assert torch.from_numpy(window.aux.view(np.uint8)).is_pinned()
                copied.append((index, copies.copy((window.aux, window.final))))
                del window
            del step
    assert len(copied) == 3 * len(selection)
    for index, (aux, final) in copied:
        expected = lake.read_window(selection.rows[index])
        assert (aux.device.type, bits(aux)) == (device.type, expected.aux.tobytes())
        assert bits(final) == expected.final.tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a stream that can be kept busy")
def test_a_slab_is_not_used_again_before_its_copy_is_done(device: torch.device) -> None:
    pool, copies = SlabPool(keep_bytes=2**26, allocate=pinned), DeviceCopies(device)
    pool.take(2**20)
    copies.copy((pool.take(2**20),))  # whatever starts lazily has started
    torch.accelerator.synchronize()
    copies.release()
    assert copies.under_way == 0
    slab = pool.take(2**20)
    slab[:] = 7
    address = slab.ctypes.data
    with copies.stream:
        torch.cuda._sleep(2 * 10**9)
    (tensor,) = copies.copy((slab,))
    del slab
    gc.collect()
    copies.release()
    assert copies.under_way == 1
    others = [pool.take(2**20) for _ in range(3)]
    for other in others:
        other[:] = 9
    assert address not in {other.ctypes.data for other in others}
    torch.accelerator.synchronize()
    assert bits(tensor) == bytes([7]) * 2**20
    copies.release()
    assert copies.under_way == 0
    assert pool.take(2**20).ctypes.data == address


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a stream that can be kept busy")
def test_what_was_copied_may_be_used_at_once_on_the_current_stream(device: torch.device) -> None:
    copies, memory = DeviceCopies(device), pinned(2**22)
    memory[:] = 3
    with copies.stream:
        torch.cuda._sleep(10**9)
    (tensor,) = copies.copy((memory,))
    doubled = tensor * 2  # nobody waited for the copy; the stream has to
    assert bool((doubled == 6).all())


@DTYPES
@pytest.mark.parametrize("layer_ids", [LAYERS, LAYERS[1:]], ids=["all layers", "some layers"])
def test_a_batch_on_the_accelerator_equals_the_one_on_the_host(
    device: torch.device, dtype: FeatureDtype, layer_ids: tuple[int, ...]
) -> None:
    lake = ToyLake(windows(dtype))
    feed = Feed(lake, device)
    reader = SelectionReader(lake, lake.select(), replace(SPEC, padded=True), allocate=feed.allocate)
    for step in reader.read():
        there, here = (f.batch(step.windows, layer_ids=layer_ids) for f in (feed, Feed(lake)))
        for field in fields(here):
            expected, found = getattr(here, field.name), getattr(there, field.name)
            if isinstance(expected, torch.Tensor):
                assert found.device.type == device.type, field.name
                assert torch.equal(found.cpu(), expected), field.name


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Lake, Selection]:
    """A lake in a folder, which loader processes could open."""
    lake = Lake.init(str(tmp_path / "lake"), TARGET)
    head_id = register_tiny_version(lake, 0, make_head())
    done = write_fragment(
        lake, version=windows(FeatureDtype.BFLOAT16)[0].meta.version, head_id=head_id, plan_id="p", writer_id="w",
        windows=windows(FeatureDtype.BFLOAT16),
    )  # fmt: skip
    return lake, selection_of(lake, [done.commit_path])


def test_a_dataset_with_page_locked_slabs_gives_the_same_items(stored: tuple[Lake, Selection]) -> None:
    items: list[Any] = []
    made: Callable[..., WindowDataset] = WindowDataset
    for pin_memory in (False, True):
        dataset = made(stored[0].url, stored[1], SPEC, epochs=2, pin_memory=pin_memory)
        loaded = []
        for step in window_loader(dataset):
            assert all(torch.from_numpy(w.aux.view(np.uint8)).is_pinned() == pin_memory for w in step.windows)
            loaded.append((step.indices, [w.aux.tobytes() + w.final.tobytes() for w in step.windows]))
        items.append(loaded)
    assert items[0] == items[1]

"""Read speeds on S3, from a server in a process of its own: what a read costs is the client's CPU alone.

The server is Python on the same machine and a ceiling for all, so ratios count and GB/s do not.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from features.catalog import Catalog
from features.lake import Lake
from features.schema import SelectionFilter
from features.storage_settings import Reader
from pipelines.bench.measure import Speed, interleaved
from pipelines.bench.subjects import Shape, checked_ranges, each_window, make_lake, training_reader

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 10

_NOT_STARTED = "the S3 server of this measurement did not start; its traceback is on stderr"

ReadAll = Callable[[], object]


def remote_speeds(shape: Shape, *, rounds: int) -> dict[str, Any]:
    """GB/s and CPU-s/GB of each way to read the same windows, and ratios of those to s3fs.

    Ways: one range after the other (``lake``) and the training reader with its threads (``reader``),
    each through s3fs and, where it is installed, through obstore; and one safetensors object per window.

    Raises:
        RuntimeError: the server did not start.
    """
    with _server() as (url, options):
        lake = make_lake(url, shape, reader=Reader.S3FS, **options)
        rows = list(Catalog.load(lake).select(SelectionFilter()).rows)
        subjects: dict[str, ReadAll] = {"safetensors_per_window": _safetensors(lake, rows)}
        readers = [Reader.S3FS] + ([Reader.OBSTORE] if find_spec("obstore") else [])
        for reader in readers:
            opened = Lake.open(url, reader=reader, **options)
            selection = Catalog.load(opened).select(SelectionFilter())
            subjects[f"lake_{reader}"] = each_window(checked_ranges(opened, rows, checked=True), rows)
            subjects[f"reader_{reader}"] = training_reader(opened, selection)
        speeds = interleaved(subjects, nbytes=shape.windows * shape.window_bytes, rounds=rounds)
    return _compared(speeds)


def _compared(speeds: Mapping[str, Speed]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "read_over_safetensors_per_window": speeds["lake_s3fs"].over(speeds["safetensors_per_window"]),
    }
    for way in ("lake", "reader"):
        mine, base = speeds.get(f"{way}_obstore"), speeds[f"{way}_s3fs"]
        figures[f"{way}_obstore_over_s3fs"] = mine.over(base) if mine else None
        figures[f"{way}_cpu_s3fs_over_obstore"] = base.cpu_s_per_gb / mine.cpu_s_per_gb if mine else None
    return figures | {
        "speeds": {
            name: {
                "median_gb_per_s": speed.median_gb_per_s,
                "cpu_s_per_gb": speed.cpu_s_per_gb,
                "gb_per_s": list(speed.gb_per_s),
            }
            for name, speed in speeds.items()
        }
    }


def _safetensors(lake: Lake, rows: Sequence[Mapping[str, Any]]) -> ReadAll:
    from safetensors.numpy import load, save

    for row in rows:
        window = lake.read_window(row)
        lake.store.create(_rival(row), save({"aux": window.aux, "final": window.final}))
    return each_window(lambda row: load(lake.store.read(_rival(row))), rows)


def _rival(row: Mapping[str, Any]) -> str:
    return f"rival/{row['sample_id']}.safetensors"


@contextmanager
def _server() -> Iterator[tuple[str, dict[str, Any]]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        theirs.close()  # so that a server that dies is heard
        if not ours.poll(START_TIMEOUT_S):
            raise RuntimeError(_NOT_STARTED)
        try:
            place = ours.recv()
        except EOFError as error:
            raise RuntimeError(_NOT_STARTED) from error
        yield place
        ours.send(None)
        process.join(STOP_TIMEOUT_S)
    finally:
        process.kill()


def _serve(pipe: Any) -> None:
    from features.testing_s3 import ServedS3

    with ServedS3() as server:
        pipe.send((server.make_bucket("bench-speed") + "/lake", server.options()))
        pipe.recv()

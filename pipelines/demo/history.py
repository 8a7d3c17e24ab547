"""Target versions: made in a second process while the engine serves the earlier ones.

Each version is a real gradient run on the prose domain, started from the version before.
A version's folder appears by rename, so whoever waits for it never sees half of one.
"""

import multiprocessing
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from features.errors import DraftlakeError
from pipelines.demo.spec import TARGET_ASSET, HistorySpec

_PEAK_FILE = "peak_rss_bytes.txt"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def version_folder(root: Path, version: int) -> Path:
    """Where version ``version`` of the target lies."""
    return root / f"v{version}"


def make_first_version(root: Path) -> Path:
    """Version 0: the shipped target, in float32."""
    from pipelines.collect import load_target

    return _save(load_target(TARGET_ASSET), version_folder(root, 0))


def make_versions(root: str, spec: HistorySpec, seed: int) -> None:
    """Make versions 1..last, one after the other (runs in its own process)."""
    import torch
    from transformers import AutoTokenizer

    from pipelines.collect import load_target
    from pipelines.demo.corpus import documents, split_documents
    from pipelines.demo.tiny_target import further_train, token_stream

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_ASSET)
    train, _ = split_documents(documents("prose"))
    stream = token_stream(tokenizer, train)
    model = load_target(version_folder(Path(root), 0))
    for version in range(1, spec.last_version + 1):
        further_train(
            model,
            stream,
            steps=spec.update_steps,
            batch=spec.update_batch,
            length=spec.update_length,
            learning_rate=spec.learning_rate,
            seed=seed + version,
        )
        _save(model, version_folder(Path(root), version))
    (Path(root) / _PEAK_FILE).write_text(str(peak_rss_bytes()))


def peak_rss_bytes() -> int:
    """Largest resident memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def moving_target(root: Path, spec: HistorySpec, seed: int) -> Iterator["MovingTarget"]:
    """Start making versions; the maker dies with the context."""
    maker = multiprocessing.get_context("spawn").Process(
        target=make_versions, args=(str(root), spec, seed), daemon=True
    )
    maker.start()
    try:
        yield MovingTarget(root, maker)
    finally:
        maker.terminate()
        maker.join()


class MovingTarget:
    """Hands out version folders as they appear."""

    def __init__(self, root: Path, maker: "multiprocessing.process.BaseProcess") -> None:
        self._root, self._maker = root, maker

    def peak_rss_bytes(self) -> int:
        """Largest resident memory of the process that made the versions; call it after the last one."""
        self._maker.join()
        return int((self._root / _PEAK_FILE).read_text())

    def wait_for(self, version: int) -> Path:
        """The folder of ``version``, once it is whole.

        Raises:
            DraftlakeError: the maker died before it finished.
        """
        folder = version_folder(self._root, version)
        while not folder.is_dir():
            if not self._maker.is_alive() and not folder.is_dir():
                raise DraftlakeError(
                    f"target version {version} was not made: the process that makes them ended with exit code "
                    f"{self._maker.exitcode}. Its error is above; free memory or disk, and run the demo again"
                )
            time.sleep(0.1)
        return folder


def _save(model: Any, folder: Path) -> Path:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for name in _TOKENIZER_FILES:
        shutil.copy(TARGET_ASSET / name, part / name)
    part.rename(folder)
    return folder

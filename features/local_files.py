"""What a local store asks of the filesystem: whole reads, durable names, links that never loop."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def no_hard_links(error: OSError) -> bool:
    """Whether an error says that the filesystem has no hard links."""
    return error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP)


def read_fully(read: Callable[[int], bytes | None], count: int) -> bytes:
    """Read ``count`` bytes, or fewer when the file ends: one unbuffered read may return less."""
    parts: list[bytes] = []
    while count > 0:
        part = read(count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class OpenFile:
    """A file that is open for reading until nobody refers to it; safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, start: int, into: memoryview) -> int:
        """Fill ``into`` from byte ``start`` on; how many bytes there were."""
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done:]], start + done)
            if count == 0:
                break
            done += count
        return done

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def leads_up(path: str, here: str) -> bool:
    """Whether ``path`` is a link to a folder that holds the folder ``here``: walking it would never end."""
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return os.path.commonpath([target, here]) == target


def make_folders(folder: Path) -> None:
    """Create a folder and its parents so that a power cut cannot lose the names."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):
            path.mkdir()
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A bucket as a store: conditional writes, patience with a busy service, many deletions in one request."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from features.cached_store import CachedStore, cache_from
from features.errors import InputError, ObjectExistsError
from features.paths import without_credentials
from features.s3_access import access_error
from features.s3_errors import UndeletedError, as_os_error, http_status, spoilt
from features.s3_ranges import RangeReader, range_reader
from features.storage import FsspecStore, Store
from features.storage_settings import Reader, s3_options

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRIED_STATUS = frozenset({409, 500, 502, 503})
_MAX_ATTEMPTS = 6
_DELETED_AT_ONCE = 1000
"""As many keys as the service takes in one request."""


class S3Store(FsspecStore):
    """A bucket. ``create`` is ``PUT`` with ``If-None-Match: *``; busy answers are tried again."""

    def __init__(self, url: str, filesystem: Any, ranges: RangeReader | None = None) -> None:
        super().__init__(url, filesystem)
        self._ranges = ranges

    @staticmethod
    def open_bucket(url: str, storage_options: dict[str, Any]) -> Store:
        """The bucket, or the folder in one, behind an ``s3://`` url, and behind a read cache where one is asked for.

        ``storage_options`` go to s3fs, all but ``reader``, ``cache_dir`` and ``cache_bytes``, over what the
        settings say (``features.storage_settings``).

        Raises:
            InputError: s3fs is not installed, the settings or the url are wrong.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc or not parts.netloc:
            raise InputError(
                f"{without_credentials(url)!r} is no place on S3: expected s3://BUCKET/PREFIX, without user or "
                f"password. Give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a profile."
            )
        options = s3_options(storage_options)
        reader = Reader(options.pop("reader", Reader.AUTO))
        cache = cache_from(options)
        try:
            filesystem = fsspec.filesystem("s3", **{**options, "use_listings_cache": False})
        except ImportError as error:
            raise InputError(f"an s3:// lake needs s3fs ({error}): pip install 'draftlake[s3]'") from error
        store = S3Store(url, filesystem, range_reader(filesystem, parts.netloc, options, reader))
        return CachedStore(store, cache) if cache is not None else store

    @property
    def about(self) -> str:
        written = self._fs.s3_additional_kwargs.get("ServerSideEncryption", "as the bucket says")
        ranges = "s3fs" if self._ranges is None else "obstore"
        service = without_credentials(self._fs.s3.meta.endpoint_url)
        return f"{self._url} at {service}; encryption: {written}; ranges read by {ranges}"

    def create(self, path: str, data: bytes) -> None:
        try:
            self._call(lambda: self._fs.pipe_file(self._at(path), data, mode="create"))
        except FileExistsError as error:
            raise ObjectExistsError(path) from error
        except OSError as error:
            if http_status(error) == 412:
                raise ObjectExistsError(path) from error
            raise

    def read(self, path: str) -> bytes:
        # One request: s3fs would ask for the size first to read parts at once, and list when that fails.
        return bytes(self._call(lambda: self._fs.cat_file(self._at(path), max_concurrency=1)))

    def exists(self, path: str) -> bool:
        # One request: s3fs would list as well, to tell a folder from nothing.
        bucket, _, key = self._at(path).partition("/")
        try:
            self._call(lambda: self._fs.call_s3("head_object", Bucket=bucket, Key=key))
        except FileNotFoundError:
            return False
        return True

    def _under(self, base: str) -> dict[str, Any]:
        # A stem, not a folder: s3fs would ask twice more whether an empty folder is an object.
        bucket, slash, key = base.partition("/")
        return dict(self._fs.find(bucket, detail=True, prefix=key + slash))

    def _read_at_most(self, path: str, start: int, stop: int) -> bytes | memoryview:
        if self._ranges is not None:
            ranges, key = self._ranges, self._at(path).partition("/")[2]
            found = self._call(lambda: ranges.read(key, start, stop))
            if found is not None:
                return found
        try:
            return super()._read_at_most(path, start, stop)
        except OSError as error:
            # The range starts past the object's end: as short as an object can be.
            if http_status(error) == 416:
                return b""
            raise

    def delete_prefix(self, prefix: str) -> None:
        names = self.list(prefix)
        for first in range(0, len(names), _DELETED_AT_ONCE):
            keys = [self._at(name).partition("/")[2] for name in names[first : first + _DELETED_AT_ONCE]]
            self._call(lambda keys=keys: self._delete_keys(keys))  # type: ignore[misc]

    def _delete_keys(self, keys: list[str]) -> None:
        # s3fs's own deletion of many passes over the keys that the service refuses to delete.
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._fs.call_s3("delete_objects", Bucket=self._root.partition("/")[0], Delete=wanted)
        if refused := answer.get("Errors"):
            raise UndeletedError(self._url, refused)

    def _call(self, operation: Callable[[], T]) -> T:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return operation()
            except Exception as error:
                known = as_os_error(error)
                if known is None:
                    raise
                status = "a spoilt body" if spoilt(known) else http_status(known)
                passing = spoilt(known) or status in _RETRIED_STATUS
                passing |= isinstance(known, UndeletedError) and known.passing
                if attempt == _MAX_ATTEMPTS or not passing:
                    known = access_error(known, url=self._url, endpoint=self._fs.endpoint_url) or known
                    raise known from known.__cause__
                pause_s = random.uniform(0.5, 1.0) * 0.1 * 2**attempt
                log.warning("storage answered %s, trying again in %.2f s (%d)", status, pause_s, attempt)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

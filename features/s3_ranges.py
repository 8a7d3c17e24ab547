"""Byte ranges of a bucket's objects through obstore: an accelerator, and never an authority.

Reads and nothing else. Address and credentials are those that the s3fs client found. Whatever does
not come back as asked is left to s3fs, which knows how to ask again and to say what is wrong.
"""

import logging
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from fsspec.asyn import sync

from features.errors import InputError
from features.storage_settings import Addressing, Reader

log = logging.getLogger(__name__)

_FAILURES_BEFORE_GIVING_UP = 3
_CREDENTIALS_KEPT = timedelta(minutes=5)
_WHOLE_TIMEOUT = timedelta(minutes=10)
_READ_TIMEOUT_S = 60.0
"""Both clients' patience with a silent connection, where no option says otherwise."""

# Options that mean the same to both clients. With any other, s3fs reads: it may change what is asked for.
_OPTIONS = frozenset({
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "s3_additional_kwargs", "secret",
    "token", "use_listings_cache",
})  # fmt: skip
_CLIENT = frozenset({"region_name"})
_CONFIG = frozenset({"connect_timeout", "max_pool_connections", "read_timeout", "retries", "s3"})
_CONFIG_S3 = frozenset({"addressing_style"})
_WRITES_ONLY = frozenset({"ServerSideEncryption", "SSEKMSKeyId"})

_REGIONS = {None: "us-east-1", "aws-global": "us-east-1"}
"""What a request is signed for where the client knows no region."""

_lock = threading.Lock()
_runs_in: list[int] = []
"""The process whose threads obstore uses; a child that is forked from it has none of them."""


class RangeReader:
    """Ranges of one bucket. Safe to share between threads, not between forked processes."""

    def __init__(self, filesystem: Any, bucket: str, options: Mapping[str, Any]) -> None:
        self._filesystem, self._bucket, self._options = filesystem, bucket, options
        self._client: Any = None
        self._failures = 0

    def read(self, key: str, start: int, stop: int) -> memoryview | None:
        """Bytes ``[start, stop)`` of an object; None when s3fs should be asked.

        Raises:
            RuntimeError: this process was forked from one that has used obstore, and would hang.
        """
        if self._failures >= _FAILURES_BEFORE_GIVING_UP:
            return None
        _require_own_process()
        import obstore
        from obstore.exceptions import BaseError

        try:
            data = memoryview(obstore.get_range(self._connected(), key, start=start, end=stop))
        except FileNotFoundError:
            return None
        except (BaseError, OSError, ValueError) as error:
            self._failures += 1
            log.debug("obstore: %s", type(error).__name__)
            if self._failures == _FAILURES_BEFORE_GIVING_UP:
                log.warning("obstore failed %d reads in a row; s3fs reads from here on", self._failures)
            return None
        self._failures = 0
        return data if len(data) == stop - start else None

    def _connected(self) -> Any:
        with _lock:
            if self._client is None:
                self._client = _client(self._filesystem, self._bucket, self._options)
        return self._client


def range_reader(
    filesystem: Any, bucket: str, options: Mapping[str, Any], reader: Reader
) -> RangeReader | None:
    """The reader that ``reader`` asks for; None: s3fs.

    Raises:
        InputError: obstore is asked for and is not installed.
    """
    installed = find_spec("obstore") is not None
    if reader is Reader.OBSTORE and not installed:
        raise InputError(
            "reader = 'obstore' is set and obstore is not installed: pip install 'draftlake[obstore]', or set "
            "reader = 'auto'"
        )
    if reader is Reader.S3FS or not installed:
        return None
    if unknown := unknown_options(options):
        log.info("s3fs reads: obstore is not known to honour %s", ", ".join(unknown))
        return None
    return RangeReader(filesystem, bucket, options)


def unknown_options(options: Mapping[str, Any]) -> list[str]:
    """Names of storage options that obstore would not honour the way s3fs does, sorted."""
    found = set(options) - _OPTIONS
    config = options.get("config_kwargs") or {}
    tables = (
        ("client_kwargs", options.get("client_kwargs") or {}, _CLIENT),
        ("config_kwargs", config, _CONFIG),
        ("config_kwargs.s3", config.get("s3") or {}, _CONFIG_S3),
        ("s3_additional_kwargs", options.get("s3_additional_kwargs") or {}, _WRITES_ONLY),
    )
    for place, table, known in tables:
        found |= {f"{place}.{name}" for name in set(table) - known}
    return sorted(found)


def _require_own_process() -> None:
    # Looked at before the lock is taken: a child may be forked while another thread holds it.
    if not _runs_in:
        with _lock:
            _runs_in.append(os.getpid())
    if _runs_in[0] != os.getpid():
        raise RuntimeError(
            "this process was forked from one that has read through obstore, whose threads it lacks: it would "
            "hang. Start loader processes with the method 'spawn'."
        )


def _client(filesystem: Any, bucket: str, options: Mapping[str, Any]) -> Any:
    from obstore.store import S3Store

    meta = filesystem.s3.meta
    config = options.get("config_kwargs") or {}
    parts = urlsplit(meta.endpoint_url)
    virtual = (config.get("s3") or {}).get("addressing_style") == Addressing.VIRTUAL
    address: dict[str, Any] = {"endpoint": meta.endpoint_url, "virtual_hosted_style_request": virtual}
    if virtual:
        address["endpoint"] = f"{parts.scheme}://{bucket}.{parts.netloc}"
    who: dict[str, Any] = {"credential_provider": _credentials(filesystem)}
    if options.get("anon"):
        who = {"skip_signature": True}
    elif options.get("key"):
        who = {"access_key_id": options["key"], "secret_access_key": options["secret"]}
        who |= {"session_token": options["token"]} if options.get("token") else {}
    return S3Store(
        bucket,
        **address,
        **who,
        region=_REGIONS.get(meta.region_name, meta.region_name),
        client_options={
            "allow_http": parts.scheme == "http",
            "connect_timeout": timedelta(seconds=config.get("connect_timeout", _READ_TIMEOUT_S)),
            "read_timeout": timedelta(seconds=config.get("read_timeout", _READ_TIMEOUT_S)),
            "timeout": _WHOLE_TIMEOUT,
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )


def _credentials(filesystem: Any) -> Any:
    """What the s3fs client signs with, asked anew every few minutes: sessions end and are renewed."""

    def provide() -> dict[str, Any]:
        found = sync(filesystem.loop, filesystem.session.get_credentials)
        frozen = sync(filesystem.loop, found.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_KEPT,
        }

    return provide

"""An S3 server for tests and benchmarks: moto, made strict, counted and, on demand, faulty.

moto answers conditional writes but does not serialise them: two racing creates can both win. Here
they pass through one lock, as on the real service. Every request is recorded, so that a test can
assert what a store was asked, and the next ones can be answered the way a bad day answers them.
Needs the packages of the ``s3`` extra and ``moto[server]``; nothing in the library imports it.
"""

import html
import io
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import EnvironBuilder

_Environ = dict[str, Any]
_Headers = list[tuple[str, str]]
_StartResponse = Callable[..., Any]

_UNAVAILABLE = {
    "503": ("503 Slow Down", "SlowDown"),
    "500": ("500 Internal Server Error", "InternalError"),
}
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_LARGE = 2**20
_NO_KEYS = re.compile(rb"<Contents>.*?</Contents>|<CommonPrefixes>.*?</CommonPrefixes>", re.DOTALL)


PATIENCE: dict[str, Any] = {"read_timeout_s": 0.3, "max_attempts": 0}
"""Arguments of :meth:`ServedS3.options` with which a client gives a request up soon."""
HOLD_S = 0.5
"""How long a fault holds a request back from a client of that :data:`PATIENCE`."""


class FaultKind(StrEnum):
    """How a request goes wrong."""

    UNAVAILABLE = "503"
    """Answered ``503 SlowDown``; nothing is done."""
    BROKEN = "500"
    """Answered ``500 InternalError``; nothing is done."""
    TIMEOUT = "timeout"
    """Held for ``hold_s``, which must be longer than the client waits, and done then: the late write."""
    LOST = "lost"
    """Done, and the connection is cut before the answer."""
    TRUNCATED = "truncated"
    """A read's body ends half-way with the connection; a write is cut before it is complete, so not done."""
    SHORT = "short"
    """A read is answered with half of the body and a length that agrees: a lying cache."""
    STALE = "stale"
    """A listing is answered as it was when it was last asked, or empty; other requests are not touched."""
    MISSING = "404"
    """A read of an object, or a look at it, is answered as if it were absent; other requests are not touched."""

    def touches(self, kind: str) -> bool:
        """Whether a request of that kind (:attr:`Request.kind`) goes wrong in this way."""
        match self:
            case FaultKind.STALE:
                return kind == "LIST"
            case FaultKind.SHORT:
                return kind == "GET"
            case FaultKind.MISSING:
                return kind in ("GET", "HEAD")
        return True


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when: at request ``at`` (from 0, counted from the injection) and ``count`` long."""

    kind: FaultKind
    at: int = 0
    count: int = 1
    hold_s: float = HOLD_S

    def hits(self, index: int) -> bool:
        return self.at <= index < self.at + self.count


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the server saw it."""

    kind: str
    """``GET``, ``HEAD``, ``LIST``, ``PUT``, ``CREATE`` (a conditional PUT), ``DELETE`` or ``POST``."""
    path: str
    """Path with the bucket; of a listing, also its prefix after a ``?``."""
    status: int
    """Answer of the service; 0 when it was not asked."""
    nbytes: int
    """Body bytes in the direction that carries data."""
    fault: FaultKind | None = None
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What was sent with it, by name in small letters."""


@contextmanager
def impatient_clients() -> Iterator[None]:
    """S3 stores of this process try each request twice, and do not wait in between."""
    import s3fs

    from features import s3_store

    with (
        patch.object(s3_store, "time", SimpleNamespace(sleep=lambda _seconds: None)),
        patch.object(s3_store, "_MAX_ATTEMPTS", 2),
        patch.object(s3fs.S3FileSystem, "retries", 2),
    ):
        yield


class ServedS3:
    """A strict, counting S3 on a loopback port, inside its ``with``.

    Args:
        access_key: refuse requests that are not signed in the name of this key; None: take them all.
    """

    def __init__(self, *, access_key: str | None = None) -> None:
        self._access_key = access_key
        self._backend = DomainDispatcherApplication(create_backend_app)
        self._creating = threading.Lock()
        self._lock = threading.Lock()
        self._log: list[Request] = []
        self._asked = 0
        self._faults: tuple[Fault, ...] = ()
        self._listings: dict[str, bytes] = {}
        # moto copies a whole object for each range of it; ranges of large ones are answered from here.
        self._large: dict[str, bytes] = {}
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "ServedS3":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def options(
        self, *, read_timeout_s: float | None = None, max_attempts: int | None = None
    ) -> dict[str, Any]:
        """Storage options that lead here; the client's own patience can be cut for tests of faults."""
        config: dict[str, Any] = {"s3": {"addressing_style": "path"}}
        if read_timeout_s is not None:
            config["read_timeout"] = read_timeout_s
        if max_attempts is not None:
            config["retries"] = {"max_attempts": max_attempts, "mode": "standard"}
        return {
            "key": "x",
            "secret": "x",
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": config,
        }

    def copy_bucket(self, source: str, target: str) -> str:
        """Create a bucket that holds the objects of another, and return its url. Not among the requests."""
        url = self.make_bucket(target)
        for key, data in self.objects(source).items():
            self._direct("PUT", f"/{target}/{key}", data)
        return url

    def objects(self, bucket: str, folder: str = "") -> dict[str, bytes]:
        """What lies in a bucket under a folder (fewer than 1000 objects), by path in it. Not among the requests."""
        prefix = f"{folder}/" if folder else ""
        listing = self._direct("GET", f"/{bucket}", query=f"list-type=2&prefix={prefix}").decode()
        keys = map(html.unescape, re.findall("<Key>(.*?)</Key>", listing))
        return {key.removeprefix(prefix): self._direct("GET", f"/{bucket}/{key}") for key in keys}

    def _direct(self, method: str, path: str, body: bytes = b"", query: str = "") -> bytes:
        headers = [
            ("Authorization", f"AWS4-HMAC-SHA256 Credential={self._access_key or 'x'}/1/us-east-1/s3/x")
        ]
        environ = EnvironBuilder(
            path, self.endpoint, query, method=method, data=body, headers=headers
        ).get_environ()
        said: list[str] = []

        def start(status: str, _headers: _Headers, _error: object = None) -> Callable[[bytes], None]:
            said.append(status)
            return lambda _data: None

        answer = b"".join(self._backend(environ, start))
        if not said[-1].startswith("200"):
            raise RuntimeError(f"{method} {path}: {said[-1]} {answer[:200]!r}")
        return answer

    def make_bucket(self, name: str) -> str:
        """Create a bucket and return its url."""
        import httpx

        scope = f"Credential={self._access_key}/20260101/us-east-1/s3/aws4_request"
        signed = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=none"}
        httpx.put(f"{self.endpoint}/{name}", headers=signed).raise_for_status()
        return f"s3://{name}"

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything asked since the last :meth:`reset`, in the order of the answers."""
        with self._lock:
            return tuple(self._log)

    def counts(self) -> Counter[str]:
        """Number of requests of each kind since the last :meth:`reset`."""
        return Counter(request.kind for request in self.requests)

    def reset(self) -> None:
        """Forget requests and faults."""
        with self._lock:
            self._log.clear()
            self._faults, self._asked = (), 0

    def inject(self, *faults: Fault) -> None:
        """Let coming requests go wrong; the next one has index 0."""
        with self._lock:
            self._faults, self._asked = faults, 0

    def _serve(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        kind = _kind_of(environ)
        with self._lock:
            index, self._asked = self._asked, self._asked + 1
            fault = next((fault for fault in self._faults if fault.hits(index)), None)
        body = (
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if _has_body(environ)
            else None
        )
        if self._access_key and f"Credential={self._access_key}/" not in environ.get(
            "HTTP_AUTHORIZATION", ""
        ):
            self._record(kind, environ, "403", 0, None)
            return _error("403 Forbidden", "InvalidAccessKeyId", kind, start_response)
        if fault is not None:
            return self._faulty(fault, kind, environ, body, start_response)
        status, headers, answer = self._answer(kind, environ, body)
        self._record(kind, environ, status, len(body or answer), None)
        start_response(status, headers)
        return [answer]

    def _faulty(
        self, fault: Fault, kind: str, environ: _Environ, body: bytes | None, start_response: _StartResponse
    ) -> Iterable[bytes]:
        if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.BROKEN):
            self._record(kind, environ, "0", 0, fault.kind)
            return _error(*_UNAVAILABLE[fault.kind.value], kind, start_response)
        if fault.kind is FaultKind.TRUNCATED and kind not in ("GET", "LIST"):
            self._record(kind, environ, "0", 0, fault.kind)
            _hang_up(environ)
        if fault.kind is FaultKind.MISSING and fault.kind.touches(kind):
            self._record(kind, environ, "0", 0, fault.kind)
            answer = b"<Error><Code>NoSuchKey</Code><Message>injected</Message></Error>"
            start_response("404 Not Found", _with_length([("Content-Type", "application/xml")], len(answer)))
            return [b"" if kind == "HEAD" else answer]
        if fault.kind is FaultKind.TIMEOUT:
            threading.Event().wait(fault.hold_s)  # no patience that a test takes from clients shortens it
        before = self._listings.get(_query(environ)) if kind == "LIST" else None
        status, headers, answer = self._answer(kind, environ, body)
        self._record(kind, environ, status, len(body or answer), fault.kind)
        if fault.kind in (FaultKind.LOST, FaultKind.TIMEOUT):
            _hang_up(environ)
        if fault.kind is FaultKind.STALE and fault.kind.touches(kind):
            answer = before if before is not None else _NO_KEYS.sub(b"", answer)
            headers = _with_length(headers, len(answer))
        if fault.kind is FaultKind.SHORT and fault.kind.touches(kind):
            answer = answer[: len(answer) // 2]
            headers = _with_length(headers, len(answer))
        start_response(status, headers)
        if fault.kind is FaultKind.TRUNCATED:
            return _half(answer, environ)
        return [answer]

    def _answer(self, kind: str, environ: _Environ, body: bytes | None) -> tuple[str, _Headers, bytes]:
        path = environ["PATH_INFO"]
        wanted = _RANGE.fullmatch(environ.get("HTTP_RANGE", "")) if kind == "GET" else None
        if wanted and path in self._large:
            return _part_of(self._large[path], int(wanted[1]), int(wanted[2]))
        if body is not None:
            environ["wsgi.input"] = io.BytesIO(body)
        said: list[tuple[str, _Headers]] = []

        def start(status: str, headers: _Headers, _error: object = None) -> Callable[[bytes], None]:
            said.append((status, headers))
            return lambda _data: None

        if kind == "CREATE" or environ.get("HTTP_IF_MATCH") or environ.get("HTTP_IF_NONE_MATCH"):
            with self._creating:
                answer = b"".join(self._backend(environ, start))
        else:
            answer = b"".join(self._backend(environ, start))
        status, headers = said[-1]
        if kind == "LIST":
            self._listings[_query(environ)] = answer
        if (
            kind in ("PUT", "CREATE")
            and body is not None
            and len(body) >= _LARGE
            and status.startswith("200")
        ):
            self._large[path] = body
        if kind in ("DELETE", "POST"):
            self._large.clear()
        return status, headers, answer

    def _record(
        self, kind: str, environ: _Environ, status: str, nbytes: int, fault: FaultKind | None
    ) -> None:
        path = environ["PATH_INFO"]
        if kind == "LIST":
            path += "?" + "".join(parse_qs(environ.get("QUERY_STRING", "")).get("prefix", ()))
        sent = {
            name[5:].replace("_", "-").lower(): value
            for name, value in environ.items()
            if name[:5] == "HTTP_"
        }
        request = Request(kind, path, int(status.split()[0]), nbytes, fault, sent)
        with self._lock:
            self._log.append(request)


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        del type, message, args

    def connection_dropped(self, error: BaseException, environ: _Environ | None = None) -> None:
        del error, environ
        self.close_connection = True


def _kind_of(environ: _Environ) -> str:
    method = str(environ["REQUEST_METHOD"])
    if method == "PUT" and environ.get("HTTP_IF_NONE_MATCH"):
        return "CREATE"
    if method == "GET" and "/" not in environ["PATH_INFO"].strip("/"):
        return "LIST"
    return method


def _has_body(environ: _Environ) -> bool:
    return environ["REQUEST_METHOD"] in ("PUT", "POST") and bool(environ.get("CONTENT_LENGTH"))


def _query(environ: _Environ) -> str:
    return f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"


def _with_length(headers: _Headers, length: int) -> _Headers:
    kept = [
        (name, value) for name, value in headers if name.lower() not in ("content-length", "content-range")
    ]
    return [*kept, ("Content-Length", str(length))]


def _part_of(data: bytes, first: int, last: int) -> tuple[str, _Headers, bytes]:
    part = data[first : last + 1]
    if not part:
        return "416 Requested Range Not Satisfiable", [("Content-Length", "0")], b""
    where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
    headers = [
        ("Content-Length", str(len(part))),
        ("Content-Range", where),
        ("Content-Type", "binary/octet-stream"),
    ]
    return "206 Partial Content", headers, part


def _error(status: str, code: str, kind: str, start_response: _StartResponse) -> list[bytes]:
    answer = f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()
    start_response(status, [("Content-Length", str(len(answer))), ("Content-Type", "application/xml")])
    return [b"" if kind == "HEAD" else answer]


def _half(answer: bytes, environ: _Environ) -> Iterator[bytes]:
    yield answer[: len(answer) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _hang_up(environ: _Environ) -> None:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("an injected fault")

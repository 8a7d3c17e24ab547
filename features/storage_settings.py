"""Settings of an S3 store that are no secret: ``draftlake.toml``, beside fsspec's and AWS's own.

The file is ``draftlake.toml`` in the working folder, or what ``DRAFTLAKE_CONFIG`` names (empty: no
file). What stands nearer to the lake wins, key by key: options given to ``Lake.open``, then the
file, then fsspec's configuration, then AWS variables and profiles, which the client reads itself.
Secrets have no place in the file: a copy of it may be committed, mailed or printed.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec.config

from features.errors import InputError

CONFIG_VARIABLE = "DRAFTLAKE_CONFIG"
CONFIG_FILE = "draftlake.toml"

_TABLE = ("lake", "storage")
_SECRET_WORDS = ("secret", "token", "password", "access_key", "credential")
_SECRET_NAMES = frozenset({"key", "username", "sse_customer_key"})
_ADDRESS_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_ADDRESS = "http://HOST:PORT or https://HOST:PORT, without user, password, query or fragment"
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")


class Addressing(StrEnum):
    """Where the bucket stands in a request's url."""

    AUTO = "auto"
    PATH = "path"
    """``https://HOST/BUCKET/KEY``: what most servers other than AWS expect."""
    VIRTUAL = "virtual"
    """``https://BUCKET.HOST/KEY``."""


class Reader(StrEnum):
    """What fetches byte ranges; everything else goes through s3fs in any case."""

    AUTO = "auto"
    """obstore where it is installed and knows all options, else s3fs."""
    S3FS = "s3fs"
    OBSTORE = "obstore"
    """As ``auto``, and an error where obstore is absent."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """What ``[lake.storage]`` may say; None leaves it to fsspec and AWS."""

    endpoint_url: str | None = None
    """Address of the S3 service, ``http://`` or ``https://``."""
    region: str | None = None
    profile: str | None = None
    """Named profile of the AWS configuration; it holds the credentials."""
    anon: bool | None = None
    """Ask without credentials, for public buckets."""
    addressing_style: Addressing | None = None
    server_side_encryption: str | None = None
    """``AES256``, ``aws:kms`` or ``aws:kms:dsse``, asked for with every object written."""
    sse_kms_key_id: str | None = None
    """Name of the key for ``aws:kms``; None takes the bucket's."""
    reader: Reader | None = None
    cache_dir: str | None = None
    """Folder on a fast local disk through which fragments are read; ``cache_bytes`` bounds it."""
    cache_bytes: int | None = None

    def options(self) -> dict[str, Any]:
        """The same as options of s3fs, and ``reader``, ``cache_dir`` and ``cache_bytes``."""
        encryption = {
            "ServerSideEncryption": self.server_side_encryption,
            "SSEKMSKeyId": self.sse_kms_key_id,
        }
        found: dict[str, Any] = {
            "endpoint_url": self.endpoint_url,
            "profile": self.profile,
            "anon": self.anon,
            "reader": self.reader,
            "cache_dir": self.cache_dir,
            "cache_bytes": self.cache_bytes,
            "client_kwargs": _stated({"region_name": self.region}),
            "config_kwargs": {"s3": {"addressing_style": self.addressing_style.value}}
            if self.addressing_style
            else {},
            "s3_additional_kwargs": _stated(encryption),
        }
        return {name: value for name, value in found.items() if value not in (None, {})}


def s3_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for s3fs, and ``reader``, from all layers above AWS's own; ``given`` wins.

    Raises:
        InputError: the settings file is named and absent or says something that it may not, or an
            address is none.
    """
    settings = read_settings()
    merged: dict[str, Any] = {}
    for layer in (fsspec.config.conf.get("s3", {}), settings.options(), given):
        merged = _merged(merged, _hoisted(layer))
    addresses = {name: os.environ.get(name) for name in _ADDRESS_VARIABLES}
    for name, address in {**addresses, "endpoint_url": merged.get("endpoint_url")}.items():
        if address and not _is_address(address):
            raise InputError(f"{name} must be {_ADDRESS}. Correct it.")
    return merged


def read_settings() -> StorageSettings:
    """The settings file; all None where there is none.

    Raises:
        InputError: it is named and absent, is no TOML, or says something that it may not.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(CONFIG_FILE if named is None else named)
    if named == "" or (named is None and not path.is_file()):
        return StorageSettings()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{CONFIG_VARIABLE} names {path}, which cannot be read ({error.strerror}). Correct the variable, "
            f"or set it to nothing to use no settings file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}. Correct it.") from None
    return parse_settings(document, where=str(path))


def parse_settings(document: Mapping[str, Any], *, where: str) -> StorageSettings:
    """The table ``[lake.storage]`` of a settings file; values of unknown keys are never quoted.

    Raises:
        InputError: a secret, an unknown table or key, or a value that does not fit.
    """
    found: Any = document
    for depth, name in enumerate(_TABLE):
        if not isinstance(found, Mapping):
            raise InputError(f"{where}: {'.'.join(_TABLE[:depth])} must be a table, [{'.'.join(_TABLE)}]")
        _require_known(found, {name}, ".".join(_TABLE[:depth]), where)
        found = found.get(name, {})
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: {'.'.join(_TABLE)} must be a table, [{'.'.join(_TABLE)}]")
    _require_known(found, {field.name for field in fields(StorageSettings)}, ".".join(_TABLE), where)
    values = {name: _value(name, value, where) for name, value in found.items()}
    settings = StorageSettings(**values)
    _require_sense(settings, where)
    return settings


def _require_known(table: Mapping[str, Any], known: set[str], place: str, where: str) -> None:
    for name in table:
        if name in known:
            continue
        low = name.lower().replace("-", "_")
        if low in _SECRET_NAMES or any(word in low for word in _SECRET_WORDS):
            raise InputError(
                f"{where}: {name!r} is a secret and has no place in a file beside a lake. Take it out (and "
                f"change it if the file was shared); give credentials by AWS_ACCESS_KEY_ID and "
                f"AWS_SECRET_ACCESS_KEY, or by profile = 'NAME' of your AWS configuration."
            )
        raise InputError(
            f"{where}: {f'[{place}]' if place else 'the file'} has no setting {name!r}; expected "
            f"{', '.join(sorted(known))}. Correct the name, or take it out."
        )


def _value(name: str, value: Any, where: str) -> Any:
    place = f"{where}: [{'.'.join(_TABLE)}] {name}"
    if name == "anon":
        if not isinstance(value, bool):
            raise InputError(f"{place} must be true or false")
        return value
    if name == "cache_bytes":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{place} must be a number of bytes, at least 1")
        return value
    if not isinstance(value, str) or not value:
        raise InputError(f"{place} must be a text that says something")
    choices: dict[str, tuple[str, ...]] = {
        "addressing_style": tuple(Addressing),
        "reader": tuple(Reader),
        "server_side_encryption": _ENCRYPTIONS,
    }
    if name in choices and value not in choices[name]:
        raise InputError(f"{place} must be one of {', '.join(choices[name])}; found {value!r}")
    match name:
        case "addressing_style":
            return Addressing(value)
        case "reader":
            return Reader(value)
    return value


def _require_sense(settings: StorageSettings, where: str) -> None:
    place = f"{where}: [{'.'.join(_TABLE)}]"
    if settings.endpoint_url is not None and not _is_address(settings.endpoint_url):
        raise InputError(f"{place} endpoint_url must be {_ADDRESS}")
    if settings.sse_kms_key_id is not None and not str(settings.server_side_encryption).startswith("aws:kms"):
        raise InputError(f"{place} sse_kms_key_id needs server_side_encryption = 'aws:kms'")
    if settings.anon and settings.profile is not None:
        raise InputError(f"{place} anon = true asks without credentials, so profile cannot be given too")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # a port that is no number is refused when it is asked for
    except ValueError:
        return False
    # A query or fragment may be a signature, and the client would quote it in its errors.
    bare = "@" not in parts.netloc and "?" not in text and "#" not in text
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bare


def _hoisted(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer that says the endpoint in one place only, so that a nearer layer can replace it."""
    client = dict(layer.get("client_kwargs") or {})
    endpoint = client.pop("endpoint_url", None)
    found = {**layer, "client_kwargs": client} if "client_kwargs" in layer else dict(layer)
    return found if endpoint is None else {"endpoint_url": endpoint, **found}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(under, value) if both else value  # type: ignore[arg-type]
    return merged


def _stated(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}

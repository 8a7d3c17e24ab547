"""``lake.json`` and ``version.json``: value types to JSON bytes and back."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from features.errors import CorruptDataError, LakeContractError, TargetMismatchError
from features.schema import FORMAT_VERSION, TargetIdentity, TargetVersion, VersionRecord

_FORMAT = "draftlake"
_VERSION_PATH = re.compile(r"versions/v=(\d{9}|[1-9]\d{9,})/version\.json")


def encode_lake(target: TargetIdentity) -> bytes:
    """``lake.json``."""
    return _json({"format": _FORMAT, "format_version": FORMAT_VERSION, "target": asdict(target)})


def decode_lake(raw: bytes, *, where: str) -> TargetIdentity:
    """Read :func:`encode_lake`.

    Raises:
        CorruptDataError: the bytes are no lake document.
        LakeContractError: a newer format wrote it.
    """
    document = _parse(raw, where=where)
    found = document.get("format_version")
    if document.get("format") != _FORMAT or not isinstance(found, int):
        raise CorruptDataError(
            f"{where} names no {_FORMAT} format: is this a lake? Restore the file from a copy."
        )
    if found > FORMAT_VERSION:
        raise LakeContractError(
            f"{where} says format {found} and this program reads up to {FORMAT_VERSION}. Upgrade draftlake "
            f"to use it."
        )
    try:
        return TargetIdentity(
            **{field.name: document["target"][field.name] for field in fields(TargetIdentity)}
        )
    except (KeyError, TypeError) as error:
        raise CorruptDataError(f"{where} describes no target ({error!r}); restore it from a copy") from error


def encode_version(record: VersionRecord) -> bytes:
    """``version.json``."""
    return _json({**asdict(record), "version": record.version.number, "format_version": FORMAT_VERSION})


def decode_version(raw: bytes, version: TargetVersion, *, where: str) -> VersionRecord:
    """Read :func:`encode_version`, which must be of ``version``.

    Raises:
        CorruptDataError: the bytes are no record, or one of another version.
    """
    document = _parse(raw, where=where)
    try:
        values = {field.name: document[field.name] for field in fields(VersionRecord)}
        record = VersionRecord(**{**values, "version": TargetVersion(document["version"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{where} is no version record ({error!r}); restore it from a copy") from error
    if record.version != version:
        raise CorruptDataError(f"{where} describes {record.version}; it was moved or copied from elsewhere")
    return record


def version_numbers(paths: Iterable[str]) -> list[int]:
    """Numbers of the versions that have a record among ``paths``, ascending; other objects are none."""
    return sorted(int(match[1]) for path in paths if (match := _VERSION_PATH.fullmatch(path)))


def require_same_target(
    offered: Any, expected: TargetIdentity, names: tuple[str, ...], *, where: str
) -> None:
    """Compare named fields of a record or identity with the lake's target.

    Raises:
        TargetMismatchError: naming each field that differs.
    """
    wrong = [
        f"{name} {getattr(offered, name)!r} (there: {getattr(expected, name)!r})"
        for name in names
        if getattr(offered, name) != getattr(expected, name)
    ]
    if wrong:
        raise TargetMismatchError(
            f"this is not the target of {where}: {'; '.join(wrong)}. A lake holds versions of one target "
            f"with one tokenizer; use the right checkpoint, or another lake."
        )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True).encode()


def _parse(raw: bytes, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise CorruptDataError(
            f"{where} ({len(raw)} bytes) is not JSON: {error}. Restore it from a copy."
        ) from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"{where} holds {type(value).__name__}, expected a JSON object")
    return value

"""A seal: the digest of a table's values inside the table's own file, checked at every read.

Object stores and disks rot, and people edit files. Features and tokens have checksums in their
commit; the commit itself, which says what they mean, has only its seal. It covers values, not
bytes, so the same rows written by another Parquet or Arrow release have the same seal.
"""

import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from features.digests import canonical_json
from features.errors import CorruptDataError

_KEY = b"draftlake.seal"


def sealed(table: pa.Table) -> pa.Table:
    """``table`` with the digest of all its columns in its metadata, beside what is there already."""
    seal = {"columns": table.column_names, "sha256": _digest(table)}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: canonical_json(seal)})


def check_seal(table: pa.Table, *, where: str) -> None:
    """Compare a table that was read with its seal; columns that the seal does not name are left aside.

    Raises:
        CorruptDataError: there is no seal, or a value, a row or a column is not as it was sealed.
    """
    raw = (table.schema.metadata or {}).get(_KEY)
    if raw is None:
        raise CorruptDataError(
            f"{where} has no digest of its rows: another program wrote it anew. Restore it from a copy."
        )
    try:
        seal = json.loads(raw)
        found = _digest(table.select(seal["columns"]))
        same = found == seal["sha256"]
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{where}: the digest of its rows cannot be checked ({error!r}). Restore it from a copy."
        ) from error
    if not same:
        raise CorruptDataError(
            f"{where}: its rows digest to {found[:12]}, it was sealed with {str(seal['sha256'])[:12]}; it was "
            f"changed after it was written. Restore it from a copy."
        )


def _digest(table: pa.Table) -> str:
    digest = hashlib.sha256()
    for name in sorted(table.column_names):
        column = table[name].combine_chunks()
        digest.update(canonical_json([name, _type_name(column.type), len(column)]))
        for part in _parts(column):
            digest.update(part)
    return digest.hexdigest()


def _type_name(kind: Any) -> str:
    # Parquet and Arrow give a list's items other names.
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _parts(column: Any) -> list[bytes]:
    """A column as bytes: which values are null, how long each is, and the values; nulls count as empty."""
    kind = column.type
    valid = np.packbits(column.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    if pa.types.is_null(kind):
        return [valid]
    if pa.types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        return [valid, _numbers(lengths), *_parts(pc.list_flatten(column))]
    if pa.types.is_string(kind):
        texts = pc.fill_null(column, "").cast(pa.large_binary())
        return [valid, _numbers(pc.binary_length(texts)), b"".join(texts.to_pylist())]
    return [
        valid,
        _numbers(pc.fill_null(column, pa.scalar(0, kind) if not pa.types.is_boolean(kind) else False)),
    ]


def _numbers(column: Any) -> bytes:
    values = column.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()

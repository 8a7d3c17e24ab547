"""Reports as tables that fit a terminal: short digests, intervals as text, nested values flattened.

Works on JSON-ready values (``output.plain``). A list of records becomes one row each, or one
block each when a record has too many fields for a row; a record becomes names and values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MAX_COLUMNS = 10
"""Fields of a record that still fit a row; with more, each record gets its own block."""
SHORT_DIGEST = 12
_MAX_LISTED = 8
_MAX_LABEL = 32
_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_INTERVAL = {"value", "low", "high"}
_LABELS = {"nbytes": "size", "mean_acceptance_length": "acceptance"}


def tables(value: Any, title: str = "") -> Iterator[RenderableType]:
    """What to print for a report; text in cells is literal, never markup."""
    if title:
        yield Text(title, style="bold")
    if isinstance(value, Mapping):
        yield from _record(value)
    elif _is_records(value):
        if max(len(row) for row in value) <= MAX_COLUMNS:
            yield _rows(value)
        else:
            for row in value:
                yield from _record(row)
    else:
        yield Text(cell(value) if value else "none")


def cell(value: Any, name: str = "", *, short: bool = False) -> str:
    """One value as text. ``name`` is its field; ``short`` cuts digests for narrow columns."""
    if value is None or (isinstance(value, Sequence | Mapping) and not value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "nbytes":
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value[:SHORT_DIGEST] if short and _DIGEST.fullmatch(value) else value
    if isinstance(value, Mapping):
        return _mapping(value, short=short)
    listed = [cell(item, short=short) for item in value[:_MAX_LISTED]]
    more = f" and {len(value) - _MAX_LISTED} more" if len(value) > _MAX_LISTED else ""
    return ", ".join(listed) + more


def interval(value: Mapping[str, float]) -> str:
    """``1.42 [1.38, 1.46]``; three decimals below one, where gains live."""
    digits = 2 if abs(value["value"]) >= 1 else 3
    middle, low, high = (f"{value[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{middle} [{low}, {high}]"


def _mapping(value: Mapping[str, Any], *, short: bool) -> str:
    if set(value) == _INTERVAL:
        return interval(value)
    if _is_estimate(value):
        scope = "" if short else f" over {value['rounds']:,} rounds of {value['groups']:,} groups"
        return interval(value["tau"]) + scope
    return ", ".join(f"{key} {cell(item, key, short=short)}" for key, item in value.items())


def _is_estimate(value: Mapping[str, Any]) -> bool:
    return {"tau", "rounds", "groups"} <= set(value) and isinstance(value["tau"], Mapping)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        numbers = bool(kinds) and kinds <= {int, float}
        table.add_column(_label(name), overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(cell(row.get(name), name, short=True)) for name in rows[0]))
    return table


def _record(record: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Names and values; lists of records follow as tables of their own."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(max_width=_MAX_LABEL)
    table.add_column(overflow="fold")
    later = []
    for name, value in _flat(record):
        if _is_records(value):
            later.append((name, value))
        else:
            table.add_row(_label(name), Text(cell(value, name.rpartition(".")[2])))
    yield table
    yield Text("")
    for name, value in later:
        yield from tables(value, _label(name))


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        nested = isinstance(value, Mapping) and value and set(value) != _INTERVAL and not _is_estimate(value)
        if nested:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

"""Row types and SQL: which column each field is, how a value goes in and how it comes back."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from projections.view import AnyTable, Json

_encoder = msgspec.json.Encoder()

_PLAIN: dict[object, str] = {
    str: "text",
    int: "bigint",
    float: "double precision",
    bool: "boolean",
    datetime: "timestamp with time zone",
}


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column as the row type wants it; `sql_type` is PostgreSQL's own spelling."""

    name: str
    sql_type: str
    nullable: bool


class Codec:
    """Rows of one table to column values and back."""

    def __init__(self, table: AnyTable) -> None:
        hints = get_type_hints(table.row_type)
        self.table = table
        self.columns = tuple(_column(name, hints[name]) for name in table.columns)
        self._ins = tuple(_way_in(hints[name]) for name in table.columns)
        self._outs = {
            place: out
            for place, name in enumerate(table.columns)
            if (out := _way_out(hints[name])) is not None
        }

    def encode(self, row: msgspec.Struct) -> list[Any]:
        """Return the column values of a row. NUL, which no PostgreSQL text can hold, becomes U+FFFD."""
        return [
            way(value) if way is not None and value is not None else value
            for way, value in zip(self._ins, msgspec.structs.astuple(row), strict=True)
        ]

    def decode(self, values: Sequence[Any]) -> msgspec.Struct:
        """Return the row of these column values."""
        found = list(values)
        for place, out in self._outs.items():
            if found[place] is not None:
                found[place] = out(found[place])
        return cast(
            "msgspec.Struct", self.table.row_type(**dict(zip(self.table.columns, found, strict=True)))
        )

    def stored(self, row: msgspec.Struct) -> msgspec.Struct:
        """Return the row as it will be read back."""
        return self.decode(self.encode(row))


_CODECS: dict[AnyTable, Codec] = {}


def codec_of(table: AnyTable) -> Codec:
    """Return the table's codec."""
    codec = _CODECS.get(table)
    if codec is None:
        codec = _CODECS[table] = Codec(table)
    return codec


def _bare(hint: Any) -> tuple[Any, bool]:
    """Return the hint without `| None`, and whether it had that."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        assert len(kinds) == 1, f"a column has one type: {hint}"
        return kinds[0], True
    return hint, False


def _column(name: str, hint: Any) -> Column:
    kind, nullable = _bare(hint)
    if kind in _PLAIN:
        sql_type = _PLAIN[kind]
    elif get_origin(kind) is Literal:
        sql_type = "text"
    elif get_origin(kind) is tuple:
        sql_type = "text[]"
    else:
        sql_type = "json"
    return Column(name=name, sql_type=sql_type, nullable=nullable)


def _way_in(hint: Any) -> Callable[[Any], Any] | None:
    kind, _ = _bare(hint)
    if kind is str:
        return _text
    if kind is Json or kind in _PLAIN or get_origin(kind) is Literal:
        return None
    if get_origin(kind) is tuple:
        return _texts
    return _json


def _way_out(hint: Any) -> Callable[[Any], Any] | None:
    kind, _ = _bare(hint)
    if kind is Json or kind in _PLAIN or get_origin(kind) is Literal:
        return None
    if get_origin(kind) is tuple:
        return tuple
    return msgspec.json.Decoder(kind).decode


def _text(value: str) -> str:
    return value.replace("\x00", "\ufffd") if "\x00" in value else value


def _texts(values: tuple[str, ...]) -> list[str]:
    return [_text(value) for value in values]


def _json(value: Any) -> str:
    return _encoder.encode(value).decode()

"""What a read model is: tables, the rows in them, and a pure fold that changes those rows fact by fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NewType, Protocol, TypeVar, cast

import msgspec

from events.envelope import Recorded, Unknown
from projections.vm import BrokenLog

Key = str | int
"""What identifies a row in its table: the row type's first field."""

Json = NewType("Json", str)
"""A column that holds JSON as text, stored as it is."""

RowT = TypeVar("RowT", bound=msgspec.Struct)


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(Generic[RowT]):
    """A table and the struct that mirrors it: same names, same order, the first field is the primary key.

    `insert_only` tables are history: their keys are sequences, each row is written once and never looked at
    by the fold.
    """

    name: str
    row_type: type[RowT]
    insert_only: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the column names, which are the row type's fields."""
        return self.row_type.__struct_fields__

    @property
    def key(self) -> str:
        """Return the name of the primary key's column."""
        return self.columns[0]


AnyTable = Table[Any]
Find = Callable[[AnyTable, Iterable[Key]], Mapping[Any, msgspec.Struct]]
Changes = Mapping[AnyTable, Mapping[Key, msgspec.Struct | None]]
"""Table -> key -> the row as it is now; None: it is gone."""


class UnknownFact(BrokenLog):
    """The log holds a fact of a newer fleetlog. Nothing can be said past it: install the version that wrote it."""


class RowSet:
    """The rows a fold works on: what it loaded, what it changed since the last `settle`.

    `find` brings rows that are not known yet. Rows stay known over `settle`, which is right as long as nobody
    else writes them; whoever learns of another writer starts with a new set.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[AnyTable, dict[Key, msgspec.Struct | None]] = {}
        self._changed: dict[AnyTable, dict[Key, msgspec.Struct | None]] = {}

    def prefetch(self, table: AnyTable, keys: Iterable[Key]) -> None:
        """Load these rows in one go; a key without a row is remembered as such."""
        known = self._known.setdefault(table, {})
        missing = [key for key in keys if key not in known]
        if missing:
            found = self._find(table, missing)
            known.update((key, found.get(key)) for key in missing)

    def get(self, table: Table[RowT], key: Key) -> RowT | None:
        """Return the row, loading it if need be."""
        known = self._known.get(table)
        if known is None or key not in known:
            self.prefetch(table, (key,))
            known = self._known[table]
        return cast("RowT | None", known[key])

    def put(self, table: Table[RowT], key: Key, row: RowT | None) -> None:
        """Set the row; None deletes it."""
        changed = self._changed.get(table)
        if changed is None:
            changed = self._changed[table] = {}
        changed[key] = row
        if not table.insert_only:
            self._known.setdefault(table, {})[key] = row

    def changes(self) -> Changes:
        """Return what was put since the last `settle`."""
        return self._changed

    def settle(self, keep: int) -> None:
        """Forget that anything changed, because it is saved; of each table stay at most `keep` rows known."""
        self._changed = {}
        for table, known in self._known.items():
            if len(known) > keep:
                self._known[table] = {}


class View(Protocol):
    """A read model: its tables, one checkpoint for all of them, and how facts change them.

    `version` rises when rows would come out differently from the same facts: the projector then starts the
    view from sequence 0.
    """

    @property
    def name(self) -> str:
        """Return the view's name, as in its checkpoint."""
        ...

    @property
    def version(self) -> int:
        """Return the version of the fold."""
        ...

    @property
    def tables(self) -> tuple[AnyTable, ...]:
        """Return the tables that are this view's alone."""
        ...

    def wants(self, fact: Recorded) -> Iterable[tuple[AnyTable, Key]]:
        """Return rows that `apply` will look at, so that they can be loaded together. A hint: may be incomplete."""
        ...

    def apply(self, rows: RowSet, fact: Recorded) -> None:
        """Change the rows by one fact.

        Raises:
            BrokenLog: the facts do not follow one another; the view stops loudly.
            UnknownFact: its tag is not known here; the view stops loudly.
        """
        ...


def unknown(fact: Recorded) -> UnknownFact:
    """Return the error for a fact this code cannot fold."""
    what = "a tag" if isinstance(fact.event, Unknown) else "an event"
    return UnknownFact(
        f"sequence {fact.sequence} ({fact.id}) has {what} this fleetlog does not know: {fact.tag}. "
        "Nothing past it can be shown; install the version that wrote it"
    )

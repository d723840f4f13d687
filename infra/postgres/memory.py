"""Rows in memory: the port's semantics without a server, with faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from actors.errors import RowRejected, RowsRefused, RowsUnavailable, StaleProjector, ViewHeld
from infra.postgres.columns import codec_of
from projections.view import AnyTable, Changes, Key, View


class MemoryRows:
    """The `Rows` port in memory. Rows pass through the column codec, so what does not survive it shows here.

    Faults: `unavailable`, `lose_next_answer` (saved, and yet the saver is told it may not be).
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._tables: dict[str, dict[Key, msgspec.Struct]] = {}
        self._checkpoints: dict[str, tuple[int, int]] = {}
        self._held: set[str] = set()
        self._down = False
        self._lose_answer = False

    def checkpoint(self, view: View) -> int:
        """Return the last sequence saved; see the port."""
        with self._mutex:
            self._answer()
            version, sequence = self._checkpoints.setdefault(view.name, (view.version, 0))
            if version > view.version:
                raise RowsRefused(
                    f"view {view.name} was made by a newer fleetlog (version {version}, here {view.version})"
                )
            if version < view.version:
                self.reset(view)
                return 0
            return sequence

    def load(self, table: AnyTable, keys: Iterable[Key]) -> Mapping[Any, msgspec.Struct]:
        """Return the rows that exist for these keys; see the port."""
        with self._mutex:
            self._answer()
            rows = self._tables.get(table.name, {})
            return {key: rows[key] for key in keys if key in rows}

    def save(self, view: View, previous: int, sequence: int, changes: Changes) -> None:
        """Save rows and checkpoint; see the port."""
        stored = {
            table: {key: None if row is None else codec_of(table).stored(row) for key, row in rows.items()}
            for table, rows in changes.items()
        }
        with self._mutex:
            self._answer()
            if self._checkpoints.get(view.name) != (view.version, previous):
                raise StaleProjector(
                    f"view {view.name} is not at {previous} any more: another projector moved it"
                )
            for table, rows in stored.items():
                if table.insert_only and not rows.keys().isdisjoint(self._tables.get(table.name, {})):
                    raise RowRejected(f"table {table.name} has one of these rows already")
            for table, rows in stored.items():
                there = self._tables.setdefault(table.name, {})
                for key, row in rows.items():
                    if row is None:
                        there.pop(key, None)
                    else:
                        there[key] = row
            self._checkpoints[view.name] = (view.version, sequence)
            if self._lose_answer:
                self._lose_answer = False
                raise RowsUnavailable("the answer was lost")

    def reset(self, view: View) -> None:
        """Empty the view; see the port."""
        with self._mutex:
            self._answer()
            for table in view.tables:
                self._tables.pop(table.name, None)
            self._checkpoints[view.name] = (view.version, 0)

    @contextmanager
    def lock(self, view: View) -> Iterator[None]:
        """Hold the view; see the port."""
        with self._mutex:
            self._answer()
            if view.name in self._held:
                raise ViewHeld(f"view {view.name} is held by another projector")
            self._held.add(view.name)
        try:
            yield
        finally:
            with self._mutex:
                self._held.discard(view.name)

    @contextmanager
    def snapshot(self, view: View) -> Iterator[MemorySnapshot]:
        """Look at the view's tables as they are now."""
        with self._mutex:
            self._answer()
            version, sequence = self._checkpoints.get(view.name, (0, 0))
            tables = {table.name: dict(self._tables.get(table.name, {})) for table in view.tables}
        yield MemorySnapshot(tables, sequence if version == view.version else None)

    # Beyond the port

    def unavailable(self, down: bool = True) -> None:  # noqa: FBT001, FBT002 - reads as a sentence
        """Let the tables not answer, or answer again."""
        with self._mutex:
            self._down = down

    def lose_next_answer(self) -> None:
        """Save the next batch and say that it may not be."""
        with self._mutex:
            self._lose_answer = True

    def _answer(self) -> None:
        if self._down:
            raise RowsUnavailable("the tables do not answer")


class MemorySnapshot:
    """A view's tables at one moment."""

    def __init__(self, tables: Mapping[str, Mapping[Any, msgspec.Struct]], sequence: int | None) -> None:
        self._tables = tables
        self.sequence = sequence

    def scan(self, table: AnyTable) -> Iterator[msgspec.Struct]:
        """Yield every row, in the order of the key."""
        rows = self._tables[table.name]
        return iter([rows[key] for key in sorted(rows)])

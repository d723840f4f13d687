"""What a coordinator knows when it starts: tables and the tail of the log, or the whole log, said loudly."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Literal, Protocol

import msgspec

from actors.errors import RowsUnavailable
from actors.ports import Journal
from projections.boot import FleetState, fold_fleet
from projections.vm import BrokenLog

logger = logging.getLogger(__name__)


class BootTables(Protocol):
    """Where the state of the last checkpoint is."""

    def boot_state(self) -> FleetState | None:
        """Return the live fleet as of one checkpoint, None if there is none."""
        ...


class Booted(msgspec.Struct, frozen=True, kw_only=True):
    """The live fleet, and how it was learned: `replayed` facts in `took_s` seconds; `reason` why not from tables."""

    state: FleetState
    source: Literal["tables", "log"]
    replayed: int
    took_s: float
    reason: str = ""


def boot(journal: Journal, tables: BootTables | None) -> Booted:
    """Return the live fleet as of the end of the log.

    Raises:
        BrokenLog: the log lost facts; also when the tables are ahead of it. Nothing may be decided on it.
        UnknownFact: the log has a fact of a newer fleetlog.
        LogUnavailable: no answer.
        RowsRefused: the tables are not for this fleetlog: waiting would not help, so starting must not hide it.
    """
    began = monotonic()
    base, reason = _from_tables(tables)
    if base is not None:
        end = journal.headroom().last_sequence
        if base.last_sequence > end:
            raise BrokenLog(
                f"the tables are at sequence {base.last_sequence} and the log ends at {end}: the log lost its tail, "
                "or these are the tables of another log. Restore the log; if it is right as it is, "
                "`fleetlog rebuild` makes the tables from it"
            )
    else:
        logger.warning("boot replays the whole log: %s", reason)
    state = fold_fleet(journal.replay(after=0 if base is None else base.last_sequence), base or FleetState())
    return Booted(
        state=state,
        source="log" if base is None else "tables",
        replayed=state.last_sequence - (0 if base is None else base.last_sequence),
        took_s=monotonic() - began,
        reason=reason,
    )


def _from_tables(tables: BootTables | None) -> tuple[FleetState | None, str]:
    if tables is None:
        return None, "there are no tables"
    try:
        base = tables.boot_state()
    except RowsUnavailable as error:
        return None, str(error)
    return base, "" if base is not None else "the tables are empty, or of another version"

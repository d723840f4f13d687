"""The timeline: one row for every fact, so that who, when, why and because of what can be asked in SQL."""

from collections.abc import Iterable
from datetime import datetime

import msgspec

from events.codec import TAGS, public
from events.envelope import Recorded
from projections.view import AnyTable, Json, Key, RowSet, Table, unknown


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One fact. `details` is the event's JSON, without a claim's code."""

    sequence: int
    aggregate: str
    version: int
    at: datetime
    tag: str
    writer: str
    epoch: int
    cause: str
    correlation: str
    details: Json


TIMELINE_TABLE = Table(name="timeline", row_type=TimelineRow, insert_only=True)

_encoder = msgspec.json.Encoder()


class TimelineView:
    """Every fact, as it was written."""

    name = "timeline"
    version = 1
    tables: tuple[AnyTable, ...] = (TIMELINE_TABLE,)

    def wants(self, fact: Recorded) -> Iterable[tuple[AnyTable, Key]]:  # noqa: ARG002 - history looks at no row
        """Return nothing: history looks at no row."""
        return ()

    def apply(self, rows: RowSet, fact: Recorded) -> None:
        """Add the fact.

        Raises:
            UnknownFact: its tag is not known here.
        """
        tag = fact.tag
        if tag not in TAGS:
            raise unknown(fact)
        row = TimelineRow(
            sequence=fact.sequence,
            aggregate=fact.aggregate,
            version=fact.version,
            at=fact.at,
            tag=tag,
            writer=fact.writer,
            epoch=fact.epoch,
            cause=fact.cause,
            correlation=fact.correlation,
            details=Json(_encoder.encode(public(fact.event)).decode()),
        )
        rows.put(TIMELINE_TABLE, fact.sequence, row)

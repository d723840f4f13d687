"""The form every fact has around it: who wrote it, when, as which version of what, and because of what."""

from datetime import datetime
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="tag"):
    """A fact. Frozen, tagged `noun.past_tense`, and never edited once released.

    A new field gets a default; a new meaning gets a new tag. Times, ids and chance are never made by
    an event: they come in with the command that led to it.
    """


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """CPU cores and bytes of memory; zero means undeclared."""

    cpus: float = 0.0
    memory_bytes: int = 0


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """A fact whose tag this code does not know: kept whole, parked by every view, never skipped."""

    tag: str
    raw: bytes


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A fact as it stands in the log.

    `sequence` is its place in the stream; `version` its place in its aggregate, counted from 1 without
    gaps. `at` is the writer's clock at the decision: folds use it, so that an actor that applies its own
    fact and a reader that replays it come to the same state. `cause` is the command or event id that led
    here, `correlation` the first cause of the chain, `attempt` the random id of the decision, by which a
    writer tells its own retried fact from another writer's. `epoch` is the leader's, 0 for all others.
    """

    sequence: int
    aggregate: str
    version: int
    at: datetime
    writer: str
    epoch: int
    cause: str
    correlation: str
    attempt: str
    event: Any

    @property
    def id(self) -> str:
        """The event id, `<aggregate>:<version>`: what consumers are idempotent by."""
        return f"{self.aggregate}:{self.version}"

    @property
    def tag(self) -> str:
        """The permanent tag, also for a fact this code does not know."""
        return tag_of(self.event)


def tag_of(event: object) -> str:
    """Return the permanent tag of an event or of a parked unknown one."""
    if isinstance(event, Unknown):
        return event.tag
    assert isinstance(event, Event), f"not a fact: {event!r}"
    return str(event.__struct_config__.tag)

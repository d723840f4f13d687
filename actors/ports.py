"""What actors need of the world; infra implements it. Every port is a plain blocking call unless it says otherwise."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, Literal, Protocol

import msgspec

from events.codec import AnyEvent
from events.envelope import Recorded
from projections.view import AnyTable, Changes, Key, View


class NewFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact about to be appended.

    `expected_sequence` is the stream sequence of the aggregate's last fact (0: none yet), given on the first
    fact of each aggregate in a decision and None on the following ones.
    """

    aggregate: str
    version: int
    expected_sequence: int | None
    event: AnyEvent


def following(aggregate: str, version: int, sequence: int, events: Iterable[AnyEvent]) -> tuple[NewFact, ...]:
    """Return an aggregate's next facts, after its last one of this version and sequence (both 0: there is none)."""
    return tuple(
        NewFact(
            aggregate=aggregate,
            version=version + 1 + index,
            expected_sequence=sequence if index == 0 else None,
            event=event,
        )
        for index, event in enumerate(events)
    )


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one decision: they are stored together or not at all, and never split over batches."""

    attempt: str  # random, made with the decision, kept through its retries
    at: datetime
    writer: str
    cause: str
    correlation: str
    facts: tuple[NewFact, ...]
    epoch: int = 0
    teardown: bool = False  # may use the headroom that is kept for ending lives


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Stored and durable; one fact for each of the decision's, in its order."""

    facts: tuple[Recorded, ...]


class Conflicted(msgspec.Struct, frozen=True, kw_only=True):
    """Another writer moved one of the aggregates; nothing was stored. Read it again and decide again."""

    aggregate: str | None  # None: one of them, the log could not say which
    detail: str


class NotAppended(msgspec.Struct, frozen=True, kw_only=True):
    """The log refused or did not answer within the deadline. `stored` None: unknown, read the log to find out."""

    code: Literal["full", "unavailable", "foreign"]
    detail: str
    stored: bool | None


Outcome = Appended | Conflicted | NotAppended


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the log is used. Demand is refused above `demand_limit_bytes`; teardown facts use the rest."""

    used_bytes: int
    limit_bytes: int
    demand_limit_bytes: int
    facts: int
    last_sequence: int


class Subscription(Protocol):
    """A running follow of the log."""

    @property
    def failure(self) -> BaseException | None:
        """Return what stopped it, None while it runs or when `stop` ended it."""
        ...

    def stop(self) -> None:
        """End it; returns when no more calls will come. Repeatable."""
        ...


class Journal(Protocol):
    """The log. The only truth, and the only place where a writer learns that it is not alone."""

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Queue a decision and return at once; `done` is called exactly once, from a thread of the journal.

        That thread must not be held up: `done` only passes the outcome on. What is refused without a look at
        the log (a full queue, a closed journal) is answered before `append` returns. Bounded: a full queue answers `NotAppended(code="unavailable", stored=False)`. After a lost
        acknowledgement the identical facts are sent again until the deadline, never regrouped; what was
        stored by an earlier try counts as stored.
        """
        ...

    def read(self, aggregate: str, after_version: int = 0) -> tuple[Recorded, ...]:
        """Return the aggregate's facts, oldest first.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    def replay(
        self, after: int = 0, until: int | None = None, aggregates: str | None = None
    ) -> Iterator[Recorded]:
        """Yield facts with `after` < sequence <= `until` (None: the end as of now), at full speed.

        `aggregates` is a wildcard such as `vm.>`. With it sequences may skip; without it a gap raises.

        Raises:
            BrokenLog: a sequence is missing.
            LogUnavailable: no answer within the deadline.
        """
        ...

    def sequence_at(self, time: datetime) -> int:
        """Return the sequence of the last fact stored at or before `time`, 0 if there is none."""
        ...

    def follow(self, after: int, deliver: Callable[[Recorded], None]) -> Subscription:
        """Call `deliver` with every fact after `after`, in order, from one thread, until stopped.

        Survives servers that go and come back, without a gap and without a repeat. If `deliver` raises, the
        follow stops and says so loudly: a fact is never skipped.
        """
        ...

    def headroom(self) -> Headroom:
        """Return how full the log is, and where it ends.

        Raises:
            LogUnavailable: no answer within the deadline.
        """
        ...

    def close(self) -> None:
        """Wait for queued appends within a bound, then let go. Repeatable."""
        ...


class Clock(Protocol):
    """Time, as a port."""

    def now(self) -> datetime:
        """Return the wall clock, UTC, aware."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds of a clock that never steps; absence and grace are measured by it."""
        ...


class Timers(Protocol):
    """Wake-ups. Bounded: one per key, a new one for the same key replaces the old."""

    def set(self, key: str, delay_s: float, call: Callable[[], object]) -> None:
        """Call `call` once after `delay_s` seconds, unless replaced or cancelled."""
        ...

    def cancel(self, key: str) -> None:
        """Forget the key's wake-up, if any."""
        ...


class Ids(Protocol):
    """Ids and chance, as a port."""

    def vm(self, at: datetime) -> str:
        """Return a new VM id: sortable by time, never reused, legal for a jailer and as a subject token."""
        ...

    def random(self) -> str:
        """Return 128 random bits as 32 hex digits: attempts, demands, commands."""
        ...


class Effects(Protocol):
    """Where slow work runs: a pool bounded in width and queue, beside the actors' threads."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` soon on some thread; it must not raise, and tells its outcome by message.

        Raises:
            Refused: the queue is full (code `overloaded`).
        """
        ...


class AgentAccess(Protocol):
    """Credentials for agents. The secret goes to the machine and nowhere else."""

    def environment(self, vm: str, labels: tuple[str, ...]) -> Mapping[str, str]:
        """Return what the agent needs to reach us as this VM and as nobody else: address, id, labels, credential.

        Raises:
            Refused: credentials cannot be minted here (code `no-signing-key`), with the way out.
        """
        ...


class AgentLink(Protocol):
    """How a coordinator speaks to a registered agent. Fire and forget: an agent that hears nothing is found by beats."""

    def stop(self, vm: str, reason: str, grace_s: float) -> None:
        """Tell the agent to end its job and leave within `grace_s` seconds."""
        ...


class CrashPoints(Protocol):
    """Named places between two steps of a life. Inert in production; in tests the process dies at the named one."""

    def reach(self, name: str) -> None:
        """Pass the point, or die there."""
        ...


class Rows(Protocol):
    """Where a projector keeps its rows and, in the same transaction, how far it has come."""

    def checkpoint(self, view: View) -> int:
        """Return the last sequence saved for this view; a view of an older version is emptied and starts at 0.

        Raises:
            RowsRefused: the rows are of a newer version.
            RowsUnavailable: no answer.
        """
        ...

    def load(self, table: AnyTable, keys: Iterable[Key]) -> Mapping[Any, msgspec.Struct]:
        """Return the rows that exist for these keys.

        Raises:
            RowsUnavailable: no answer.
        """
        ...

    def save(self, view: View, previous: int, sequence: int, changes: Changes) -> None:
        """Upsert rows (None deletes), move the checkpoint from `previous` to `sequence`: all in one transaction.

        After RowsUnavailable it may be saved or not: `checkpoint` tells.

        Raises:
            StaleProjector: the checkpoint is not at `previous`; another projector moved it.
            RowRejected: a row can never be stored.
            RowsRefused: these tables are not for this fleetlog.
            RowsUnavailable: the database does not answer; try again later.
        """
        ...

    def reset(self, view: View) -> None:
        """Empty the view's tables and put its checkpoint at 0, in one transaction."""
        ...

    def lock(self, view: View) -> AbstractContextManager[None]:
        """Hold the view for one projector. It saves work; what keeps rows right is `save`.

        Raises:
            ViewHeld: another one holds it.
            RowsUnavailable: no answer.
        """
        ...

"""The projector: follows the log, folds a view, saves rows and checkpoint in one transaction, and never skips."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from actors.errors import LogUnavailable, RowRejected, RowsRefused, RowsUnavailable, StaleProjector, ViewHeld
from actors.ports import Clock, Journal, Rows, Subscription
from events.codec import Malformed
from events.envelope import Recorded
from projections.view import AnyTable, Key, RowSet, View
from projections.vm import BrokenLog

logger = logging.getLogger(__name__)

Stage = Literal[
    "starting",
    "catching-up",
    "live",
    "waiting",  # the tables or the log do not answer; tried again
    "standby",  # another projector works on this view
    "parked",  # a fact or the tables make going on impossible; a person must look
    "stopped",
]


class ProjectorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a view is. `parked_at` is the sequence it cannot pass, None when the tables are the reason."""

    view: str
    stage: Stage
    sequence: int = 0
    head: int = 0  # the newest fact this projector heard of
    lag_s: float = 0.0  # how old the last saved fact was when newer ones waited
    reason: str = ""
    parked_at: int | None = None

    @property
    def lag_facts(self) -> int:
        """Return how many facts are not in the tables yet."""
        return max(0, self.head - self.sequence)


class ProjectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds. A live batch is what came within `linger_s` of its first fact, at most `batch_facts`."""

    batch_facts: int = 2000
    linger_s: float = 0.05
    queue_facts: int = 20_000
    keep_rows: int = 10_000
    retry_min_s: float = 0.2
    retry_max_s: float = 5.0
    check_s: float = 1.0  # how often an idle projector looks whether it is still the one, and missed nothing


class _Parked(Exception):  # noqa: N818 - leaves the loop, nothing else
    def __init__(self, reason: str, sequence: int | None) -> None:
        super().__init__(reason)
        self.sequence = sequence


class Projector:
    """One view's projector, on a thread of its own.

    `changed` is called from that thread at every change of stage; it must not block or raise.
    """

    def __init__(
        self,
        journal: Journal,
        rows: Rows,
        view: View,
        clock: Clock,
        *,
        options: ProjectorOptions | None = None,
        changed: Callable[[ProjectorStatus], None] = lambda _: None,
    ) -> None:
        self._journal = journal
        self._rows = rows
        self._view = view
        self._clock = clock
        self._options = options or ProjectorOptions()
        self._changed = changed
        self._status = ProjectorStatus(view=view.name, stage="starting")
        self._known = RowSet(rows.load)
        self._sequence = 0
        self._refusal = ""
        self._inbox = _Inbox(self._options.queue_facts)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"projector {view.name}", daemon=True)

    def start(self) -> None:
        """Begin, once."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the batch it is at; return whether it did within `timeout_s`. Repeatable."""
        self._stopping.set()
        self._inbox.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> ProjectorStatus:
        """Return how far it is; from any thread."""
        status = self._status
        head = max(status.head, self._inbox.head)
        return status if head == status.head else msgspec.structs.replace(status, head=head)

    def _run(self) -> None:
        delay_s = self._options.retry_min_s
        while not self._stopping.is_set():
            before = self._sequence
            try:
                with self._rows.lock(self._view):
                    self._project()
            except (RowsUnavailable, LogUnavailable) as error:
                self._say("waiting", str(error))
            except ViewHeld as error:
                self._say("standby", str(error))
            except StaleProjector as error:
                logger.warning("projector of %s: %s; it loads its state again", self._view.name, error)
                self._say("standby", str(error))
            except RowsRefused as error:
                self._park(str(error), None)
                return
            except _Parked as error:
                self._park(str(error), error.sequence)
                return
            except Exception as error:  # our own bug, which must be as loud as a poisoned log
                logger.exception("projector of %s failed", self._view.name)
                self._park(f"{type(error).__name__}: {error}", None)
                return
            delay_s = (
                self._options.retry_min_s
                if self._sequence > before
                else min(delay_s * 2, self._options.retry_max_s)
            )
            self._stopping.wait(delay_s)
        self._say("stopped")

    def _project(self) -> None:
        """Work until stopped or until something raises."""
        self._known = RowSet(self._rows.load)
        self._sequence = self._rows.checkpoint(self._view)
        self._say("catching-up")
        while not self._stopping.is_set():
            self._catch_up()
            self._follow()

    def _catch_up(self) -> None:
        """Replay at our own pace up to the end of the log as of now."""
        batch: list[Recorded] = []
        try:
            for fact in self._journal.replay(after=self._sequence):
                batch.append(fact)
                if len(batch) >= self._options.batch_facts:
                    self._take(batch)
                    batch = []
                if self._stopping.is_set():
                    return
        except (BrokenLog, Malformed) as error:
            self._take(batch)  # what came before it is good
            raise _Parked(str(error), self._sequence + 1) from error
        self._take(batch)

    def _follow(self) -> None:
        """Take facts as they come; return when some may have been missed and a replay must bring them."""
        inbox = self._inbox = _Inbox(self._options.queue_facts)
        subscription = self._subscribe(inbox)
        try:
            self._say("live")
            while not self._stopping.is_set():
                batch = inbox.take(self._options.batch_facts, self._options.linger_s, self._options.check_s)
                self._take(batch)
                if not batch and (inbox.overflowed or subscription.failure or self._missed_some()):
                    return
        finally:
            subscription.stop()

    def _subscribe(self, inbox: _Inbox) -> Subscription:
        try:
            return self._journal.follow(self._sequence, inbox.put)
        except (BrokenLog, Malformed) as error:
            raise _Parked(str(error), self._sequence + 1) from error

    def _missed_some(self) -> bool:
        """Look, while idle, whether this is still the projector and whether the log went on without telling."""
        if self._rows.checkpoint(self._view) != self._sequence:
            raise StaleProjector(f"view {self._view.name} is not at {self._sequence} any more")
        return self._journal.headroom().last_sequence > self._sequence and self._inbox.empty()

    def _take(self, batch: Sequence[Recorded]) -> None:
        """Fold and save a batch; at a fact that cannot be folded, save what is before it and park there."""
        if not batch:
            return
        good = self._fold(batch)
        if good < len(batch):
            self._known = RowSet(self._rows.load)  # the failing fold may have changed half of what it should
            assert self._fold(batch[:good]) == good
        if good:
            self._save(batch[:good])
        if good < len(batch):
            raise _Parked(self._refusal, batch[good].sequence)

    def _fold(self, batch: Sequence[Recorded]) -> int:
        """Apply facts to the known rows; return how many could be."""
        wanted: dict[AnyTable, set[Key]] = defaultdict(set)
        for fact in batch:
            for table, key in self._view.wants(fact):
                wanted[table].add(key)
        for table, keys in wanted.items():
            self._known.prefetch(table, keys)
        expected = self._sequence
        for place, fact in enumerate(batch):
            expected += 1
            try:
                _check_follows(fact, expected)
                self._view.apply(self._known, fact)
            except (RowsUnavailable, RowsRefused):
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the fact cannot be folded
                kind = "" if isinstance(error, BrokenLog) else f"{type(error).__name__}: "
                self._refusal = f"{kind}{error}"
                return place
        return len(batch)

    def _save(self, batch: Sequence[Recorded]) -> None:
        last = batch[-1].sequence
        try:
            self._rows.save(self._view, self._sequence, last, self._known.changes())
        except RowRejected as error:
            self._halve(batch, error)
            return
        self._known.settle(self._options.keep_rows)
        self._sequence = last
        head = max(self._status.head, self._inbox.head, last)
        age_s = (self._clock.now() - batch[-1].at).total_seconds()
        self._status = msgspec.structs.replace(
            self._status, sequence=last, head=head, lag_s=max(0.0, age_s) if head > last else 0.0
        )

    def _halve(self, batch: Sequence[Recorded], error: RowRejected) -> None:
        """Find the fact whose row the database refuses, by saving smaller and smaller pieces."""
        if len(batch) == 1:
            raise _Parked(f"{batch[0].id}: {error}", batch[0].sequence) from error
        self._known = RowSet(self._rows.load)
        middle = len(batch) // 2
        self._take(batch[:middle])
        self._take(batch[middle:])

    def _park(self, reason: str, sequence: int | None) -> None:
        where = "" if sequence is None else f" at sequence {sequence}"
        logger.error("view %s is parked%s: %s", self._view.name, where, reason)
        self._say("parked", reason, sequence)

    def _say(self, stage: Stage, reason: str = "", parked_at: int | None = None) -> None:
        before = self._status
        self._status = msgspec.structs.replace(
            before, stage=stage, sequence=self._sequence, reason=reason, parked_at=parked_at
        )
        if (before.stage, before.reason) != (stage, reason):
            self._changed(self._status)


def _check_follows(fact: Recorded, expected: int) -> None:
    if fact.sequence != expected:
        raise BrokenLog(f"sequence {fact.sequence} follows {expected - 1}: facts are missing")


class _Inbox:
    """Facts of a follow that wait for the projector. Full, it takes no more: a replay brings what it left out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._facts: deque[Recorded] = deque()
        self._condition = threading.Condition()
        self._woken = False
        self.overflowed = False
        self.head = 0

    def put(self, fact: Recorded) -> None:
        """Take a fact, or leave it and all later ones out. Never blocks and never raises: the log must go on."""
        with self._condition:
            self.head = fact.sequence
            if self.overflowed or len(self._facts) >= self._limit:
                self.overflowed = True
                return
            self._facts.append(fact)
            if len(self._facts) == 1:
                self._condition.notify()

    def take(self, most: int, linger_s: float, wait_s: float) -> list[Recorded]:
        """Return up to `most` facts: none after `wait_s` without any, else those that came within `linger_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._facts or self._woken, wait_s)
            if self._facts and not self._woken and not self.overflowed and len(self._facts) < most:
                self._condition.wait_for(lambda: self._woken, linger_s)
            return [self._facts.popleft() for _ in range(min(most, len(self._facts)))]

    def wake(self) -> None:
        """End any waiting, now and from now on."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def empty(self) -> bool:
        """Tell whether nothing waits."""
        with self._condition:
            return not self._facts

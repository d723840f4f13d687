"""Appends without waiting: a bounded queue and one thread that commits what has come together, as a group."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from actors.lending import lent_thread, take_over
from actors.ports import Decision, NotAppended, Outcome
from events import subjects
from events.codec import encode
from infra.journal.commit import Committer
from infra.journal.exchange import Connect, Exchange
from infra.journal.form import FACTS_MAX, check_decision, form_of
from infra.journal.messages import HEADER_BYTES_MAX, Entry
from infra.journal.room import Room
from infra.journal.stream import FACT_BYTES_MAX

_log = logging.getLogger("fleetlog.journal")
_FEW = 3
"""Up to so many facts go as plain publishes: each costs a sync (0.3 ms here, many times that on a busy disk), a batch
2.4 ms and about two syncs whatever its size."""
_QUEUED_FACTS_MAX = 100_000
_IDLE_S = 30.0


class Appender:
    """See `Journal.append`. One group in flight, one wire, and one thread at it: ours, or a caller's that would wait.

    `done` is called by that thread, which must not be held up: it may only pass the outcome on. What it raises is
    logged. A decision refused at once (queue full, closed) is answered from the caller's thread.
    """

    def __init__(
        self,
        connect: Connect,
        cluster: str,
        *,
        ack_timeout_s: float,
        deadline_s: float,
        room: Room,
        name: str = "",
        queued_facts_max: int = _QUEUED_FACTS_MAX,
    ) -> None:
        self._exchange = Exchange(connect, ack_timeout_s=ack_timeout_s)
        self._hurry = threading.Event()
        self._committer = Committer(self._exchange, cluster, self._wait)
        self._deadline_s = deadline_s
        self._room = room
        self._queued_facts_max = queued_facts_max
        self._queue: deque[Entry] = deque()
        self._queued_facts = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"journal appender {name}".strip(), daemon=True
        )
        self._thread.start()

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Queue a decision; see the port."""
        check_decision(decision)
        payloads = tuple([encode(form_of(decision, fact)) for fact in decision.facts])
        longest = max(map(len, payloads))
        assert longest + HEADER_BYTES_MAX <= FACT_BYTES_MAX, (
            f"{decision.facts[0].aggregate}: a fact of {longest} bytes"
        )
        entry = Entry(decision, payloads, done, time.monotonic() + self._deadline_s)
        with self._changed:
            if self._closed:
                refusal = "the journal is closed"
            elif self._queued_facts + len(payloads) > self._queued_facts_max:
                refusal = f"{self._queued_facts} facts wait to be appended already; the log is slow or away"
            else:
                idle = not self._queue and not self._busy
                self._queue.append(entry)
                self._queued_facts += len(payloads)
                if idle and take_over(self._drive):
                    self._busy = True
                elif not self._busy:  # else whoever is at it looks again
                    self._changed.notify_all()
                return
        done(NotAppended(code="unavailable", detail=refusal, stored=False))

    def take_no_more(self) -> None:
        """Refuse what comes from now on; what is queued goes on. Repeatable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Take no more, wait for what is queued within `timeout_s`, then refuse the rest. Repeatable."""
        self.take_no_more()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)
            left = list(self._queue)
            self._queue.clear()
            self._queued_facts = 0
        self._hurry.set()
        for entry in left:
            _tell(entry, NotAppended(code="unavailable", detail="the journal was closed", stored=False))
        self._thread.join(self._exchange.ack_timeout_s * 2)

    def _wait(self, seconds: float) -> None:
        self._hurry.wait(seconds)

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            try:
                if group:
                    self._commit(group)
                else:
                    self._exchange.keep_alive()
            finally:
                self._rest()
        self._exchange.drop()

    def _drive(self) -> None:
        """Commit one group on the thread of a caller, who found nobody at it and took the place of our thread."""
        try:
            with self._changed:
                group = self._take()
            self._commit(group)
        finally:
            self._rest()

    def _rest(self) -> None:
        with self._changed:
            self._busy = False
            if self._queue or self._closed:
                self._changed.notify_all()

    def _next_group(self) -> list[Entry] | None:
        """Take what fits together, and the wire with it; empty after a quiet time, None at the end."""
        with self._changed:
            while True:
                due = self._changed.wait_for(self._is_due, _IDLE_S)
                if self._busy:  # a caller is at it: the wire is in use
                    continue
                if due and not self._queue:
                    return None
                self._busy = True
                return self._take()

    def _is_due(self) -> bool:
        return not self._busy and (bool(self._queue) or self._closed)

    def _take(self) -> list[Entry]:
        group: list[Entry] = []
        facts = 0
        touched: set[str] = set()
        while self._queue:
            entry = self._queue[0]
            mine = _touched(entry.decision)
            # A second decision on an aggregate is told where it stands only when the first is through.
            if facts + len(entry.payloads) > FACTS_MAX or not touched.isdisjoint(mine):
                break
            touched |= mine
            facts += len(entry.payloads)
            group.append(self._queue.popleft())
        self._queued_facts -= facts
        return group

    def _commit(self, group: list[Entry]) -> None:
        group = self._with_room(group)
        if not group:
            return
        if len(group) <= _FEW and all(len(entry.payloads) == 1 for entry in group):
            outcomes = self._committer.pipelined(group)
        else:
            outcomes = self._committer.batch(group)
        told = list(zip(group, outcomes, strict=True))
        self._room.settle(group, (entry for entry, outcome in told if not isinstance(outcome, NotAppended)))
        if len(told) == 1 and not self._queue:
            with lent_thread():  # nobody waits for this thread: the actor need not wait for another one
                _tell(*told[0])
            return
        for entry, outcome in told:
            _tell(entry, outcome)

    def _with_room(self, group: list[Entry]) -> list[Entry]:
        """Refuse what demand may not use any more; the rest is for ending lives."""
        taken, refusal = self._room.take(group, self._exchange)
        if len(taken) < len(group):
            places = {id(entry) for entry in taken}
            for entry in group:
                if id(entry) not in places:
                    _tell(entry, NotAppended(code="full", detail=refusal, stored=False))
        return taken


def _touched(decision: Decision) -> set[str]:
    touched = {fact.aggregate for fact in decision.facts}
    return touched | {subjects.leader()} if decision.epoch else touched


def _tell(entry: Entry, outcome: Outcome) -> None:
    try:
        entry.done(outcome)
    except Exception:  # noqa: BLE001 - the other decisions of the group must be told
        _log.exception("whoever appended %s could not take the outcome", entry.decision.facts[0].aggregate)

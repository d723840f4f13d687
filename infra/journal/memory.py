"""The log in memory: what the contract suite, the simulation and tests use, with faults on demand."""

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime

from actors.errors import LogUnavailable
from actors.ports import (
    Appended,
    Clock,
    Conflicted,
    Decision,
    Headroom,
    NotAppended,
    Outcome,
)
from events import subjects
from events.codec import decode, encode
from events.envelope import Recorded
from infra.journal.delivery import Delivery, report_stopped_follow
from infra.journal.form import check_decision, form_of, guarded, matches
from infra.journal.headroom import demand_limit
from projections.vm import BrokenLog

Run = Callable[[Callable[[], None]], None]
_STORED_OVERHEAD_BYTES = 160
_STEPS_MAX = 1 << 20


class Inline:
    """Runs what it is given at once, in the caller's thread; what comes meanwhile is run after it, in order.

    Give it to `MemoryJournal` and everything is deterministic: `append` returns after `done` was called, unless
    it was itself called from a callback of the journal.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._running = False

    def __call__(self, step: Callable[[], None]) -> None:
        """Run the step, and all that it leads to."""
        self._queue.append(step)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            self._running = False


class MemoryJournal:
    """The port's semantics without a server. Facts pass through the codec, so what does not survive it shows here.

    `run` is how a step is run that calls somebody back (a `done`, one delivery of a follow): `Inline()` for
    determinism at once, or a simulation's scheduler, which may run them in any order and still sees facts in
    order. Without it a thread of the journal does.

    Faults: `unavailable`, `full`, `lose_next_ack`, `drop` (a hole, as no real log has).
    """

    def __init__(
        self,
        clock: Clock,
        *,
        run: Run | None = None,
        limit_bytes: int = 1 << 30,
        live_machines: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._delivery: Delivery | None = None
        if run is None:
            self._delivery = Delivery("memory journal", limit=_STEPS_MAX)
            self._run: Run = self._put
        else:
            self._run = run
        self._live_machines = live_machines
        self._lock = threading.RLock()
        self._stored_at: list[datetime] = []
        self._facts: list[Recorded | None] = []
        self._by_aggregate: dict[str, list[int]] = {}
        self._used_bytes = 0
        self._limit_bytes = limit_bytes
        self._follows: list[_Follow] = []
        self._down = False
        self._is_full = False
        self._lost_acks: deque[bool] = deque()
        self._closed = False

    # The port

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Store or refuse at once; `done` is told through `run`."""
        check_decision(decision)
        outcome = self._append(decision)
        if self._closed:
            done(outcome)
            return
        self._run(lambda: done(outcome))
        self._wake()

    def read(self, aggregate: str, after_version: int = 0) -> tuple[Recorded, ...]:
        """Return the aggregate's facts, oldest first."""
        with self._lock:
            self._answer()
            facts = (self._facts[sequence - 1] for sequence in self._by_aggregate.get(aggregate, ()))
            return tuple(fact for fact in facts if fact is not None and fact.version > after_version)

    def replay(
        self, after: int = 0, until: int | None = None, aggregates: str | None = None
    ) -> Iterator[Recorded]:
        """Yield facts; see the port. The end is that of the first call of `next`."""
        with self._lock:
            self._answer()
            end = len(self._facts) if until is None else min(until, len(self._facts))
            if after > len(self._facts):
                raise BrokenLog(
                    f"the log ends at {len(self._facts)}, and {after} was read before: it lost its tail"
                )
        for sequence in range(after + 1, end + 1):
            with self._lock:
                self._answer()
                fact = self._facts[sequence - 1]
            if fact is None and aggregates is None:
                raise BrokenLog(f"sequence {sequence} is missing")
            if fact is not None and (aggregates is None or subjects.matches(aggregates, fact.aggregate)):
                yield fact

    def sequence_at(self, time: datetime) -> int:
        """Return the sequence of the last fact stored at or before `time`."""
        with self._lock:
            self._answer()
            return bisect.bisect_right(self._stored_at, time)

    def follow(self, after: int, deliver: Callable[[Recorded], None]) -> "_Follow":
        """Deliver facts after `after`, one `run` step each; see the port."""
        with self._lock:
            follow = _Follow(self, after, deliver)
            self._follows.append(follow)
        self._wake()
        return follow

    def headroom(self) -> Headroom:
        """Return how full the log is."""
        with self._lock:
            self._answer()
            return Headroom(
                used_bytes=self._used_bytes,
                limit_bytes=self._limit_bytes,
                demand_limit_bytes=demand_limit(self._limit_bytes, self._live_machines()),
                facts=len(self._facts),
                last_sequence=len(self._facts),
            )

    def close(self) -> None:
        """Take no more appends; end follows. Repeatable."""
        with self._lock:
            self._closed = True
            follows = list(self._follows)
        for follow in follows:
            follow.stop()
        if self._delivery is not None:
            self._delivery.drain()

    # Beyond the port

    def resize(self, limit_bytes: int) -> None:
        """Set another limit."""
        with self._lock:
            self._limit_bytes = limit_bytes

    def unavailable(self, down: bool = True) -> None:  # noqa: FBT001, FBT002 - reads as a sentence
        """Let the log not answer, or answer again."""
        with self._lock:
            self._down = down
        if not down:
            self._wake()

    def full(self, full: bool = True) -> None:  # noqa: FBT001, FBT002
        """Let the log be at its limit for everything, teardown included, or not any more."""
        with self._lock:
            self._is_full = full

    def lose_next_ack(self, *, retries_fail: bool = False) -> None:
        """Lose the acknowledgement of the next append that is stored.

        The retry then finds it stored, and the append counts. With `retries_fail` nobody answers any more
        before the deadline, and the writer is told `stored=None`, though it is stored.
        """
        with self._lock:
            self._lost_acks.append(retries_fail)

    def drop(self, sequence: int) -> None:
        """Make a hole, which readers must notice."""
        with self._lock:
            self._facts[sequence - 1] = None

    def put_raw(self, payload: bytes) -> Recorded:
        """Store the wire form of a fact as another writer would, such as one with a tag of a later version."""
        with self._lock:
            fact = decode(payload, len(self._facts) + 1)
            self._store(payload, fact)
        self._wake()
        return fact

    # Inside

    def fact_after(self, sequence: int) -> Recorded | None:
        """Return the next fact a follow is due, None when there is none yet or nobody answers."""
        with self._lock:
            if self._down or sequence == len(self._facts):
                return None
            if sequence > len(self._facts):
                raise BrokenLog(
                    f"the log ends at {len(self._facts)}, and {sequence} was read before: it lost its tail"
                )
            fact = self._facts[sequence]
            if fact is None:
                raise BrokenLog(f"sequence {sequence + 1} is missing")
            return fact

    def run(self, step: Callable[[], None]) -> None:
        """Run a step of a follow."""
        self._run(step)

    def forget(self, follow: "_Follow") -> None:
        """Drop an ended follow."""
        with self._lock:
            if follow in self._follows:
                self._follows.remove(follow)

    def _put(self, step: Callable[[], None]) -> None:
        assert self._delivery is not None
        if not self._delivery.put(step) and not self._closed:
            raise LogUnavailable(
                f"{_STEPS_MAX} callbacks of the memory journal wait: somebody blocks its thread"
            )

    def _answer(self) -> None:
        if self._down:
            raise LogUnavailable("the log does not answer; check that NATS runs")

    def _append(self, decision: Decision) -> Outcome:
        with self._lock:
            if self._closed:
                return NotAppended(code="unavailable", detail="the journal is closed", stored=False)
            if self._down:
                return NotAppended(code="unavailable", detail="no answer within the deadline", stored=False)
            moved = self._moved(decision)
            if moved is not None:
                mine = self._stored_before(decision)
                return Appended(facts=mine) if mine is not None else moved
            payloads = tuple(encode(form_of(decision, fact)) for fact in decision.facts)
            if (refusal := self._room(decision, payloads)) is not None:
                return refusal
            stored = tuple(self._decoded_and_stored(payload) for payload in payloads)
            if self._lost_acks and self._lost_acks.popleft():
                return NotAppended(
                    code="unavailable", detail="no acknowledgement within the deadline", stored=None
                )
            return Appended(facts=stored)

    def _moved(self, decision: Decision) -> Conflicted | None:
        if decision.epoch and (last := self._last(subjects.leader())) != decision.epoch:
            return Conflicted(
                aggregate=subjects.leader(),
                detail=f"epoch {decision.epoch} is over: the leader was elected at {last}",
            )
        for _, fact in guarded(decision):
            if (last := self._last(fact.aggregate)) != fact.expected_sequence:
                return Conflicted(
                    aggregate=fact.aggregate,
                    detail=f"{fact.aggregate} is at sequence {last}, {fact.expected_sequence} was expected",
                )
        return None

    def _stored_before(self, decision: Decision) -> tuple[Recorded, ...] | None:
        anchor, fact = guarded(decision)[0]
        later = (s for s in self._by_aggregate.get(fact.aggregate, ()) if s > (fact.expected_sequence or 0))
        first = next(later, 0) - anchor
        if first < 1:
            return None
        found = self._facts[first - 1 : first - 1 + len(decision.facts)]
        if len(found) < len(decision.facts):
            return None
        mine = tuple(
            f for f, new in zip(found, decision.facts, strict=True) if f and matches(f, decision, new)
        )
        return mine if len(mine) == len(found) else None

    def _room(self, decision: Decision, payloads: tuple[bytes, ...]) -> NotAppended | None:
        size = sum(len(payload) + _STORED_OVERHEAD_BYTES for payload in payloads)
        limit = self._limit_bytes
        if not decision.teardown:
            limit = demand_limit(limit, self._live_machines())
        if not self._is_full and self._used_bytes + size <= limit:
            return None
        return NotAppended(
            code="full",
            detail=f"the log has {self._used_bytes} of {self._limit_bytes} bytes; `fleetlog log resize` raises it",
            stored=False,
        )

    def _decoded_and_stored(self, payload: bytes) -> Recorded:
        fact = decode(payload, len(self._facts) + 1)
        self._store(payload, fact)
        return fact

    def _store(self, payload: bytes, fact: Recorded) -> None:
        self._facts.append(fact)
        self._stored_at.append(self._clock.now())
        self._by_aggregate.setdefault(fact.aggregate, []).append(fact.sequence)
        self._used_bytes += len(payload) + _STORED_OVERHEAD_BYTES

    def _last(self, aggregate: str) -> int:
        return self._by_aggregate.get(aggregate, [0])[-1]

    def _wake(self) -> None:
        with self._lock:
            follows = list(self._follows)
        for follow in follows:
            follow.wake()


class _Follow:
    """A follow of a memory journal: one step in the queue at a time, one fact for each step."""

    def __init__(self, journal: MemoryJournal, after: int, deliver: Callable[[Recorded], None]) -> None:
        self._failure: BaseException | None = None
        self._journal = journal
        self._after = after
        self._deliver = deliver
        self._queued = False
        self._stopped = False
        self._lock = threading.RLock()

    @property
    def failure(self) -> BaseException | None:
        """What stopped it, None while it runs or when `stop` ended it."""
        return self._failure

    def stop(self) -> None:
        """End it; a call that runs in another thread is waited for."""
        with self._lock:
            self._stopped = True
        self._journal.forget(self)

    def wake(self) -> None:
        """Queue a step unless one is queued."""
        with self._lock:
            if self._queued or self._stopped:
                return
            self._queued = True
        self._journal.run(self._step)

    def _step(self) -> None:
        with self._lock:
            self._queued = False
            if self._stopped:
                return
            try:
                fact = self._journal.fact_after(self._after)
                if fact is None:
                    return
                self._deliver(fact)
            except Exception as error:  # noqa: BLE001 - whatever it is stops the follow, loudly
                self.stop()
                report_stopped_follow(self._after, error)
                self._failure = error
                return
            self._after = fact.sequence
        self.wake()

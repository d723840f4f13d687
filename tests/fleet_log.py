"""Logs for tests of read models: legal lives in any order, and a log in a list that can be broken at will."""

import random  # noqa: TID251 - a seed reproduces the log
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from actors.errors import LogUnavailable
from actors.ports import Decision, Headroom, Outcome
from events.backend import DrainStarted, Paused, Resumed, SlotTaken
from events.codec import AnyEvent
from events.coordinator import ConfigApplied, GlobalSlotTaken, Started, Stopped
from events.demand import Placed
from events.envelope import Recorded, Resources, Unknown
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Reason,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownFailed,
)
from projections.vm import BrokenLog

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
COORDINATORS = ("alpha", "beta")
SCALERS = ("small", "large", "metal")

FAILURES: tuple[Reason, ...] = (
    "launch-failed",
    "spawn-timeout",
    "exited-early",
    "exited",
    "register-timeout",
)


class Story:
    """Writes a fleet's log, decision by decision, from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.facts: list[Recorded] = []
        self.decisions: list[int] = []  # after how many facts each decision ends
        self.at = BEGIN
        self._versions: dict[str, int] = {}
        self._lives: dict[str, Iterator[None]] = {}
        self._count = 0
        for coordinator in COORDINATORS:
            self.decide(
                (
                    f"coordinator.{coordinator}",
                    Started(host=f"{coordinator}-host", boot_id="b1", pid=7, version="1"),
                )
            )
            rules = ConfigApplied(digest="d1", global_max_agents=50, scalers={"small": {"max_agents": 9}})
            self.decide((f"coordinator.{coordinator}", rules))

    def decide(self, *facts: tuple[str, AnyEvent | Unknown]) -> None:
        """Write the facts of one decision."""
        self.at += timedelta(milliseconds=self.random.randint(0, 900))
        attempt = f"{self.random.getrandbits(64):016x}"
        for aggregate, event in facts:
            version = self._versions[aggregate] = self._versions.get(aggregate, 0) + 1
            self.facts.append(
                Recorded(
                    sequence=len(self.facts) + 1,
                    aggregate=aggregate,
                    version=version,
                    at=self.at,
                    writer="alpha",
                    epoch=0,
                    cause=f"command-{len(self.facts)}",
                    correlation=aggregate,
                    attempt=attempt,
                    event=event,
                )
            )
        self.decisions.append(len(self.facts))

    @property
    def living(self) -> int:
        """How many lives are not reaped."""
        return len(self._lives)

    def step(self, *, end: bool = False) -> None:
        """Let something happen: a new life, or the next step of one."""
        dice = self.random.random()
        if not end and (not self._lives or dice < 0.15):
            self.begin()
        elif not end and dice < 0.18:
            self._rule()
        elif self._lives:
            vm = self.random.choice(list(self._lives))
            if next(self._lives[vm], self) is self:
                del self._lives[vm]

    def begin(self, *, straight: bool = False) -> str:
        """Begin a life; `straight` is the usual one, without anything odd."""
        self._count += 1
        vm = f"vm-{self._count:07}"
        self._lives[vm] = self._live(vm, straight=straight)
        next(self._lives[vm])
        return vm

    def finish(self, vm: str, steps: int | None = None) -> None:
        """Live a life on to its end, or for a number of steps."""
        life = self._lives[vm]
        while steps is None or steps > 0:
            if next(life, self) is self:
                del self._lives[vm]
                return
            steps = None if steps is None else steps - 1

    def run(self, steps: int) -> "Story":
        """Let so many things happen."""
        for _ in range(steps):
            self.step()
        return self

    def _rule(self) -> None:
        scaler = f"backend.alpha.{self.random.choice(SCALERS)}"
        event = self.random.choice((Paused(by="me"), Resumed(by="me"), DrainStarted(by="you")))
        self.decide((scaler, event))
        if self.random.random() < 0.3:
            self.decide(("coordinator.beta", Stopped(reason="upgrade")))
            self.decide(("coordinator.beta", Started(host="beta-host", boot_id="b2", pid=8, version="2")))

    def _live(self, vm: str, *, straight: bool) -> Iterator[None]:
        odd = 0.0 if straight else self.random.random()
        coordinator = COORDINATORS[0] if straight else self.random.choice(COORDINATORS)
        scaler = self.random.choice(SCALERS)
        slot = f"backend.{coordinator}.{scaler}"
        requests = Resources(cpus=self.random.choice((0.1, 0.7, 2)), memory_bytes=1 << 30)
        job = None if odd > 0.6 else f"job-{vm}"
        me = f"vm.{vm}"
        facts: list[tuple[str, AnyEvent | Unknown]] = [
            (slot, SlotTaken(vm=vm, requests=requests)),
            (f"coordinator.{coordinator}", GlobalSlotTaken(vm=vm)),
            (me, _request(scaler, slot, coordinator, requests, job)),
            (f"demand.{vm}", Placed(labels=("linux",), vms=(vm,), job=job)),
        ]
        self.decide(*facts)
        yield
        failed: Reason | None = None
        if odd < 0.9:
            self.decide((me, SpawnStarted()))
            yield
            if odd < 0.75:
                self.decide(
                    (me, Spawned(handle=Handle(driver="bare-metal", version=1, data={"pid": 42, "start": 9})))
                )
                yield
                if odd < 0.6:
                    self.decide((me, Registered(session=f"session-{vm}", facts={"os": "linux"})))
                    yield
                    self.decide((me, ConfigAcked()))
                    yield
            if 0.1 < odd < 0.2:
                self.decide((me, TakenUp(coordinator=coordinator, evidence="pid 42 since 9")))
                self.decide((me, Adopted(owner="beta")))
                self.decide((me, Spared(evidence="a beat came")))
                yield
            if odd > 0.5:
                failed = self.random.choice(FAILURES)
        if odd > 0.85:
            self.decide((me, Condemned(reason="operator", evidence="asked for")))
        if failed is not None:
            self.decide((me, Failed(reason=failed, detail=f"it broke\t\\N\nü\x00 {odd}", exit_code=3)))
            if odd > 0.8:
                self.decide((me, Failed(reason=failed, detail="told again")))
        else:
            self.decide((me, Draining(reason="job-complete", exit_code=0)))
        yield
        if 0.3 < odd < 0.4:
            self.decide((me, TeardownFailed(detail="busy", tries=1, retry_in_s=2)))
            yield
        self.decide((me, Reaped(reason=failed or "job-complete", slot=slot, evidence="nothing left")))


def _request(scaler: str, slot: str, coordinator: str, requests: Resources, job: str | None) -> Requested:
    return Requested(
        scaler=scaler,
        backend="bare-metal",
        slot=slot,
        owner=coordinator,
        host=f"{coordinator}-host",
        boot_id="b1",
        labels=("linux", scaler),
        agent_labels=("linux",),
        job=job,
        run=None if job is None else "run-1",
        requests=requests,
        placement={"directory": "/srv/fleet/x", "cgroup": {"path": "fleetlog/x"}},
    )


class ListLog:
    """As much of the `Journal` port as readers need, over a list. It hands out whatever the list holds."""

    def __init__(self, facts: list[Recorded]) -> None:
        self.facts = facts
        self.down = False
        self._lock = threading.Lock()
        self._follows: list[_ListFollow] = []

    def replay(
        self, after: int = 0, until: int | None = None, aggregates: str | None = None
    ) -> Iterator[Recorded]:
        """Yield the facts, checking nothing."""
        assert aggregates is None
        if self.down:
            raise LogUnavailable("down")
        end = len(self.facts) if until is None else until
        if after > len(self.facts):
            raise BrokenLog(f"the log ends at {len(self.facts)}, and {after} was read before")
        yield from (fact for fact in self.facts[after:end] if fact.sequence > after)

    def follow(self, after: int, deliver: Callable[[Recorded], None]) -> "_ListFollow":
        """Deliver what is there and what `write` brings."""
        with self._lock:
            follow = _ListFollow(deliver)
            self._follows.append(follow)
            for fact in self.facts[after:]:
                deliver(fact)
        return follow

    def write(self, *facts: Recorded) -> None:
        """Add facts and deliver them."""
        with self._lock:
            self.facts.extend(facts)
            for follow in self._follows:
                for fact in facts:
                    follow.deliver(fact)

    def headroom(self) -> Headroom:
        """Tell where the log ends."""
        if self.down:
            raise LogUnavailable("down")
        last = self.facts[-1].sequence if self.facts else 0
        return Headroom(
            used_bytes=0, limit_bytes=1, demand_limit_bytes=1, facts=len(self.facts), last_sequence=last
        )

    def read(self, aggregate: str, after_version: int = 0) -> tuple[Recorded, ...]:
        """Return an aggregate's facts."""
        return tuple(f for f in self.facts if f.aggregate == aggregate and f.version > after_version)

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Not for readers."""
        raise AssertionError

    def sequence_at(self, time: datetime) -> int:
        """Not for these readers."""
        raise AssertionError

    def close(self) -> None:
        """Nothing to close."""


class _ListFollow:
    failure: BaseException | None = None

    def __init__(self, deliver: Callable[[Recorded], None]) -> None:
        self._deliver: Callable[[Recorded], None] | None = deliver

    def deliver(self, fact: Recorded) -> None:
        if self._deliver is not None:
            self._deliver(fact)

    def stop(self) -> None:
        self._deliver = None


def unknown_fact(sequence: int, **changes: Any) -> Recorded:
    """Return a fact of a newer fleetlog."""
    fields: dict[str, Any] = {
        "sequence": sequence,
        "aggregate": "vm.vm-future",
        "version": 1,
        "at": BEGIN,
        "writer": "alpha",
        "epoch": 0,
        "cause": "c",
        "correlation": "c",
        "attempt": "a",
        "event": Unknown(tag="vm.teleported", raw=b'{"tag":"vm.teleported"}'),
    }
    return Recorded(**{**fields, **changes})

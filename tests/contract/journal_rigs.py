"""Both journals behind one face, with the faults that the contract needs, and decisions to append."""

import base64
import itertools
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from actors.ports import Appended, Conflicted, Decision, Journal, NewFact, NotAppended, Outcome
from events import subjects
from events.codec import AnyEvent
from events.vm import Requested, SpawnStarted
from infra.journal.address import NatsAddress
from infra.journal.headroom import demand_limit
from infra.journal.jetstream import call
from infra.journal.memory import MemoryJournal
from infra.journal.nats import NatsJournal
from infra.journal.wire import Wire
from tests.conftest import NatsServer, wall_time
from tests.contract.nats_tools import Proxy, address_of

AT = datetime(2031, 2, 3, 4, 5, 6, 789012, tzinfo=UTC)
_attempts = itertools.count(1)


def requested(mark: str = "") -> Requested:
    """Return a first fact with every kind of value in it; `mark` makes it tell from others."""
    return Requested(
        scaler="small",
        backend="bare-metal",
        slot="backend.one.small",
        owner="one",
        host="host",
        boot_id="boot",
        labels=("linux", "x64"),
        job=mark or None,
        placement={"cgroup": "/fleet/é", "ports": [1, 2], "nested": {"none": None, "half": 0.5}},
    )


def fact(aggregate: str, version: int, expected: int | None, event: AnyEvent | None = None) -> NewFact:
    """Return a fact to append."""
    event = event or (requested() if version == 1 else SpawnStarted())
    return NewFact(aggregate=aggregate, version=version, expected_sequence=expected, event=event)


def decide(*facts: NewFact, attempt: str | None = None, epoch: int = 0, teardown: bool = False) -> Decision:
    """Return a decision of these facts with an attempt of its own."""
    return Decision(
        attempt=attempt or f"{next(_attempts):032x}",
        at=AT,
        writer="one",
        cause="command-1",
        correlation="demand-1",
        facts=facts,
        epoch=epoch,
        teardown=teardown,
    )


def first(aggregate: str, mark: str = "") -> Decision:
    """Return the decision that begins an aggregate."""
    return decide(fact(aggregate, 1, 0, requested(mark)))


class Told:
    """Gathers outcomes by decision, and notices a second one."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.repeated: list[str] = []
        self._changed = threading.Condition()

    def of(self, decision: Decision) -> Callable[[Outcome], None]:
        """Return the `done` of a decision."""

        def done(outcome: Outcome) -> None:
            with self._changed:
                if decision.attempt in self.outcomes:
                    self.repeated.append(decision.attempt)
                self.outcomes[decision.attempt] = outcome
                self._changed.notify_all()

        return done

    def all(self, decisions: list[Decision], timeout_s: float = 30) -> list[Outcome]:
        """Wait until all are told, and return their outcomes in order."""
        with self._changed:
            missing = [d for d in decisions if d.attempt not in self.outcomes]
            assert self._changed.wait_for(
                lambda: all(d.attempt in self.outcomes for d in decisions), timeout_s
            ), (
                f"{len(missing)} of {len(decisions)} decisions were not told their outcome within {timeout_s} s"
            )
        assert not self.repeated
        return [self.outcomes[d.attempt] for d in decisions]


def append_all(journal: Journal, decisions: list[Decision], timeout_s: float = 30) -> list[Outcome]:
    """Append all at once and wait for every outcome."""
    told = Told()
    for decision in decisions:
        journal.append(decision, told.of(decision))
    return told.all(decisions, timeout_s)


def append(journal: Journal, decision: Decision, timeout_s: float = 30) -> Outcome:
    """Append one and wait for its outcome."""
    return append_all(journal, [decision], timeout_s)[0]


def appended(journal: Journal, decision: Decision) -> Appended:
    """Append one that must succeed."""
    outcome = append(journal, decision)
    assert isinstance(outcome, Appended), outcome
    return outcome


def conflicted(outcome: Outcome) -> Conflicted:
    """Expect a conflict."""
    assert isinstance(outcome, Conflicted), outcome
    return outcome


def refused(outcome: Outcome) -> NotAppended:
    """Expect a refusal."""
    assert isinstance(outcome, NotAppended), outcome
    return outcome


class Rig(Protocol):
    """A journal and what can be done to it."""

    @property
    def journal(self) -> Journal:
        """The log."""
        ...

    def another(self) -> Journal:
        """Return the same log through another writer's journal."""
        ...

    def lose_next_ack(self) -> None:
        """Let the next acknowledgement get lost."""
        ...

    def down(self) -> None:
        """Let the log not answer."""
        ...

    def up(self) -> None:
        """Let it answer again."""
        ...

    def put_raw(self, aggregate: str, payload: bytes) -> None:
        """Store bytes as another version of this program would."""
        ...

    def make_hole(self) -> None:
        """Lose the third of five facts, behind the journal's back."""
        ...

    def limit(self, bytes_left_for_demand: int) -> None:
        """Set the limit so that demand may still use so much."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class MemoryRig:
    """The journal in memory, with a thread of its own."""

    def __init__(self) -> None:
        self.journal = MemoryJournal(_Now())

    def another(self) -> Journal:
        return self.journal

    def lose_next_ack(self) -> None:
        self.journal.lose_next_ack()

    def down(self) -> None:
        self.journal.unavailable()

    def up(self) -> None:
        self.journal.unavailable(False)  # noqa: FBT003

    def put_raw(self, aggregate: str, payload: bytes) -> None:
        self.journal.put_raw(payload)

    def make_hole(self) -> None:
        append_all(self.journal, [first(f"vm.h{n}") for n in range(5)])
        self.journal.drop(3)

    def limit(self, bytes_left_for_demand: int) -> None:
        self.journal.resize(_limit_for(self.journal.headroom().used_bytes + bytes_left_for_demand))

    def close(self) -> None:
        self.journal.close()


class NatsRig:
    """The journal on a server of its own, behind a proxy that can lose acknowledgements."""

    def __init__(self, server: NatsServer, cluster: str = "test") -> None:
        self.server = server
        self.cluster = cluster
        self.proxy = Proxy(server.port)
        self._journals: list[NatsJournal] = []
        self.journal = self.another()

    @property
    def proxied(self) -> NatsAddress:
        """The server's address through the proxy."""
        return NatsAddress(url=f"nats://127.0.0.1:{self.proxy.port}", creds=self.server.creds_path)

    def another(self, **options: float) -> NatsJournal:
        settings: dict[str, float] = {"deadline_s": 4.0, "ack_timeout_s": 0.5, "read_timeout_s": 1.2}
        journal = NatsJournal(self.proxied, self.cluster, limit_bytes=1 << 28, **(settings | options))  # type: ignore[arg-type]
        self._journals.append(journal)
        return journal

    def lose_next_ack(self) -> None:
        """Swallow what the server says until a new connection is made, which is not before the ack is overdue."""
        self.proxy.swallow_until_reconnect()

    def down(self) -> None:
        self.server.kill()

    def up(self) -> None:
        self.server.start()

    def put_raw(self, aggregate: str, payload: bytes) -> None:
        with self.wire() as wire:
            wire.request(subjects.log(self.cluster, aggregate), payload, 5)

    def wire(self) -> Wire:
        """Return a connection of the test's own."""
        return Wire(address_of(self.server), name="test")

    def stream_config(self) -> dict[str, object]:
        """Return the stream's settings."""
        with self.wire() as wire:
            config: dict[str, object] = call(wire, f"STREAM.INFO.{subjects.stream(self.cluster)}", None, 5)[
                "config"
            ]
            return config

    def make_hole(self) -> None:
        append_all(self.journal, [first(f"vm.h{n}") for n in range(5)])
        name = subjects.stream(self.cluster)
        config = self.stream_config()
        with self.wire() as wire:
            kept = [call(wire, f"STREAM.MSG.GET.{name}", {"seq": n}, 5)["message"] for n in range(1, 6)]
            call(wire, f"STREAM.DELETE.{name}", None, 5)
            open_config = config | {"deny_delete": False, "metadata": {}}
            call(wire, f"STREAM.CREATE.{name}", open_config, 5)
            for message in kept:
                wire.request(message["subject"], base64.b64decode(message["data"]), 5)
            call(wire, f"STREAM.MSG.DELETE.{name}", {"seq": 3}, 5)
            call(wire, f"STREAM.UPDATE.{name}", open_config | {"deny_delete": True}, 5)

    def limit(self, bytes_left_for_demand: int) -> None:
        self.journal.resize(_limit_for(self.journal.headroom().used_bytes + bytes_left_for_demand))

    def close(self) -> None:
        self.proxy.swallowing.clear()
        for journal in self._journals:
            journal.close()
        self.proxy.close()


class _Now:
    def now(self) -> datetime:
        return wall_time()

    def monotonic_s(self) -> float:
        return time.monotonic()


def _limit_for(demand_bytes: int) -> int:
    limit = demand_bytes + demand_bytes // 9
    assert abs(demand_limit(limit, 0) - demand_bytes) < 4
    return limit

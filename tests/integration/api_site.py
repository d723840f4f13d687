"""A cluster for tests of the API and the command line: a real log on a real NATS, and a front door that is told what to say."""

import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from click.testing import CliRunner, Result

from actors.commands import (
    AgentDone,
    Answer,
    Demand,
    RegisterAgent,
    Registration,
    RemoveAgent,
    ScalerStatus,
    SetGate,
)
from actors.decisions.labels import RoutableScaler, explain
from actors.ports import Appended, Decision, NewFact, Outcome
from events.backend import SlotTaken
from events.codec import AnyEvent
from events.coordinator import ConfigApplied, Started
from events.envelope import Recorded
from events.vm import (
    Draining,
    Failed,
    Handle,
    Reaped,
    Registered,
    Requested,
    Spawned,
    SpawnStarted,
)
from infra.api.door import ApiDoor, Care, Knowledge
from infra.api.messages import HostDifference, ServerStatus, StatusAnswer
from infra.cli.main import main
from infra.ids import SystemIds
from infra.journal.address import NatsAddress
from infra.journal.connection import NatsConnection
from infra.journal.nats import NatsJournal
from tests.conftest import NatsServer, wall_time

_clusters = itertools.count(1)
BUSY, DEAD, OVER = "a-busy", "a-dead", "a-over"
LOG_BYTES = 16 << 20  # the session's server has room for many of these
SMALL = RoutableScaler(name="small", backend="scripted", label_sets=(("linux", "small"),))
SMALL_STATUS = ScalerStatus(
    name="small",
    backend="scripted",
    gate="open",
    max_agents=3,
    taken=1,
    starting=0,
    waiting=0,
    registered=1,
    failures=0,
    labels=(("linux", "small"),),
)


class ScriptedDoor:
    """Answers what it was told to, raises what it was told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.answers: tuple[Answer, ...] = ()
        self.error: Exception | None = None
        self.lines: tuple[str, ...] = ()
        self.hold = threading.Event()
        self.hold.set()
        self.on_demand: Callable[[Demand], tuple[Answer, ...]] | None = None

    def demand(self, demand: Demand) -> tuple[Answer, ...]:
        self._ask(demand)
        return self.answers if self.on_demand is None else self.on_demand(demand)

    def register(self, command: RegisterAgent) -> Registration | None:
        raise AssertionError("agents do not come this way")

    def config_acked(self, vm: str, session: str) -> None:
        raise AssertionError("agents do not come this way")

    def beat(self, vm: str, session: str) -> bool:
        raise AssertionError("agents do not come this way")

    def done(self, command: AgentDone) -> None:
        raise AssertionError("agents do not come this way")

    def remove(self, command: RemoveAgent) -> None:
        self._ask(command)

    def set_gate(self, command: SetGate) -> None:
        self._ask(command)

    def scalers(self) -> tuple[ScalerStatus, ...]:
        self._ask("scalers")
        return (SMALL_STATUS,)

    def log_tail(self, vm: str, lines: int) -> tuple[str, ...]:
        self._ask((vm, lines))
        return self.lines[-lines:]

    def _ask(self, what: object) -> None:
        self.asked.append(what)
        assert self.hold.wait(30)
        if self.error is not None:
            raise self.error


class ApiSite:
    """One cluster of its own on a NATS server; `door` serves coordinator `alpha` while `serving`."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.cluster = f"cli-{next(_clusters)}"
        self.address = NatsAddress(url=server.url, creds=server.creds_path)
        self.journal = NatsJournal(self.address, self.cluster, limit_bytes=LOG_BYTES)
        self.connection = NatsConnection(self.address, name="test")
        self.door = ScriptedDoor()
        self.differences: tuple[HostDifference, ...] = ()
        self.care: Care | None = None
        self.at = wall_time(-3600)
        self._ends: dict[str, tuple[int, int]] = {}

    def close(self) -> None:
        """Let go of the server."""
        self.connection.close()
        self.journal.close()

    @contextmanager
    def serving(self, *, threads: int = 4, waiting_max: int = 64) -> Iterator[ApiDoor]:
        """Serve as coordinator `alpha`."""
        knowledge = Knowledge(
            status=self._status,
            explain=lambda labels, exclude: explain((SMALL,), labels, exclude),
            verify_host=lambda: self.differences,
            care=self.care,
            host="alpha-host",
        )
        door = ApiDoor(
            self.connection,
            self.cluster,
            "alpha",
            self.door,
            ids=SystemIds(),
            knowledge=knowledge,
            threads=threads,
            waiting_max=waiting_max,
        )
        door.start()
        try:
            yield door
        finally:
            self.door.hold.set()
            door.close()

    def _status(self) -> StatusAnswer:
        nats = ServerStatus(
            name="nats", running=True, durability="every acknowledged write is synced to disk"
        )
        return StatusAnswer(coordinator="alpha", now=wall_time(), host="alpha-host", pid=7, servers=(nats,))

    def tell(
        self, *facts: tuple[str, AnyEvent], cause: str = "test", later_s: float = 1.0
    ) -> tuple[Recorded, ...]:
        """Append facts of one decision, `later_s` after the one before."""
        self.at += timedelta(seconds=later_s)
        new = []
        seen: set[str] = set()
        for aggregate, event in facts:
            version, sequence = self._ends.get(aggregate, (0, 0))
            expected = None if aggregate in seen else sequence
            seen.add(aggregate)
            new.append(
                NewFact(aggregate=aggregate, version=version + 1, expected_sequence=expected, event=event)
            )
            self._ends[aggregate] = (version + 1, sequence)
        decision = Decision(
            attempt=SystemIds().random(),
            at=self.at,
            writer="alpha",
            cause=cause,
            correlation=cause,
            facts=tuple(new),
        )
        done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.journal.append(decision, done.put)
        outcome = done.get(timeout=10)
        assert isinstance(outcome, Appended), outcome
        for fact in outcome.facts:
            self._ends[fact.aggregate] = (fact.version, fact.sequence)
        return outcome.facts

    def start_coordinator(self) -> None:
        """Let the log know of coordinator `alpha` with one scaler."""
        self.tell(("coordinator.alpha", Started(host="alpha-host", boot_id="b", pid=7, version="1")))
        rules = {
            "small": {"backend": "scripted", "max_agents": 3, "label_sets": [{"labels": ["linux", "small"]}]}
        }
        applied = ConfigApplied(digest="d" * 64, global_max_agents=5, scalers=rules)
        self.tell(("coordinator.alpha", applied))

    def request(self, vm: str, *, job: str | None = None, scaler: str = "small") -> None:
        """Begin a life."""
        slot = f"backend.alpha.{scaler}"
        requested = Requested(
            scaler=scaler,
            backend="scripted",
            slot=slot,
            owner="alpha",
            host="alpha-host",
            boot_id="b",
            labels=("linux", "small"),
            job=job,
            placement={"directory": f"/run/{vm}"},
        )
        self.tell((slot, SlotTaken(vm=vm)), (f"vm.{vm}", requested), cause=f"demand:{vm}")

    def register(self, vm: str) -> None:
        """Let a requested machine come up and its agent register."""
        self.tell((f"vm.{vm}", SpawnStarted()))
        self.tell((f"vm.{vm}", Spawned(handle=Handle(driver="scripted", version=1, data={"pid": 77}))))
        self.tell((f"vm.{vm}", Registered(session="s" * 32, agent_version="1")), cause="agent:s")

    def fail(self, vm: str, detail: str) -> None:
        """Let a requested machine fail to start."""
        self.tell((f"vm.{vm}", SpawnStarted()))
        self.tell((f"vm.{vm}", Failed(reason="launch-failed", detail=detail)))

    def reap(self, vm: str) -> None:
        """End a registered life."""
        self.tell((f"vm.{vm}", Draining(reason="job-complete", exit_code=0)))
        self.tell((f"vm.{vm}", Reaped(reason="job-complete", slot="backend.alpha.small", evidence="gone")))

    def fill(self) -> None:
        """One agent registered, one failed, one reaped; 18 facts."""
        self.start_coordinator()
        self.request(BUSY, job="build-1")
        self.register(BUSY)
        self.request(DEAD, job="two")
        self.fail(DEAD, "no \x1b[2J/dev/kvm")
        self.request(OVER)
        self.register(OVER)
        self.reap(OVER)

    def cli(self, *args: str, env: dict[str, str] | None = None) -> Result:
        """Run the command line against this cluster, with the operator's credentials."""
        return run_cli(
            "--cluster",
            self.cluster,
            "--nats",
            self.server.url,
            "--nats-creds",
            str(self.server.operator_creds_path),
            *args,
            env=env,
        )

    def cli_json(self, *args: str, code: int = 0) -> Any:
        """Run with `--json` and return the document."""
        result = self.cli("--json", *args)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


def run_cli(*args: str, env: dict[str, str] | None = None) -> Result:
    """Run the command line; a bug of ours shows."""
    result = CliRunner(env=env).invoke(main, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result

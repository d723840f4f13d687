"""A whole coordinator on a virtual clock: every step is chosen by a seed, and any of them may be its last.

Nothing here runs beside the chosen step: actors take turns (a pool without threads), effects, the log's
acknowledgements and timers are queues. A crash drops all of them and keeps the log and the virtual host.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from pykka import ActorRegistry

from actors.commands import (
    AgentDone,
    Answer,
    Demand,
    RegisterAgent,
    RemoveAgent,
    ReportProvision,
    SetGate,
)
from actors.decisions.addresses import AddressPool
from actors.decisions.capacity import ScalerRules, Site
from actors.decisions.labels import RoutableScaler
from actors.decisions.scale import BACKEND, Terms
from actors.decisions.vm import NoteConfigAcked
from actors.errors import LogUnavailable, Refused
from actors.fleet import Fleet, Routing
from actors.pooled import ActorPool
from actors.ports import Decision, following
from actors.supervisor import Supervisor
from actors.world import Call, World, tell
from events import subjects
from events.codec import AnyEvent
from events.coordinator import ConfigApplied, Started
from events.scale import Down, Up
from events.vm import Draining, Failed, Reaped, Spawned
from infra.drivers.event import EventDriver
from infra.drivers.scripted import Script, ScriptedDriver, VirtualHost
from infra.journal.memory import MemoryJournal
from projections.boot import FleetState, fold_fleet
from tests.simulation.cloud import TARGET, VirtualCloud
from tests.simulation.virtual import (
    Crashed,
    CrashingPoints,
    NoAccess,
    NoLink,
    Queue,
    SeededIds,
    VirtualClock,
    VirtualTimers,
)

SCALERS = {"small": 3, "large": 2, "cloud": 2}
CLOUD = "cloud"
"""The scaler whose machines a provisioner starts."""

TERMS = Terms(cluster="test", nats_url="nats://10.0.0.1:4222")
GLOBAL_MOST = 4
NETWORK = subjects.allocator("h1", "net")
POOL = AddressPool(aggregate=NETWORK, cidr="10.44.0.0/29", gateway="10.44.0.1", bridge="flt-br0")
OCCUPIED = frozenset({"10.44.0.2"})
"""The addresses .3 to .6 are left for a scaler of three: each is used again and again."""


class Simulation:
    """One seed's run."""

    def __init__(self, seed: int, script: Callable[[str], Script] | None = None, grace_s: float = 60) -> None:
        self.grace_s = grace_s
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.acknowledgements = Queue()
        self.journal = MemoryJournal(self.clock, run=self.acknowledgements.submit)
        self.host = VirtualHost()
        self.cloud = VirtualCloud(self.journal, random.Random(seed), self._provisioned)
        self.script = script
        self.ids = SeededIds(self.chance)
        self.points = CrashingPoints()
        self.answers: list[Answer] = []
        self.registered: set[str] = set()
        self.spawned: dict[str, int] = {}
        self.crashes = 0
        self.taken_up = 0
        self.steps = 0
        self.bugs = False
        self.boot()

    # One process.

    def boot(self) -> None:
        """Start a coordinator over what the log and the host hold."""
        self.points.left, self.points.bugs_left, self.points.died = None, None, False
        self.acknowledgements.steps.clear()
        self.pool = ActorPool(workers=0, messages_per_turn=1)
        self.timers = VirtualTimers(self.clock)
        self.spawns, self.teardowns, self.reads = Queue(), Queue(), Queue()
        self.fatal: list[str] = []
        self.driver = ScriptedDriver(self.host, owner="c1", script=self.script, reach=self._reach_driver)
        rules = {name: self._rules(name, most) for name, most in SCALERS.items()}
        self.world = World(
            site=Site(coordinator="c1", host="h1", boot_id=self.host.boot_id),
            rules={rule.slot: rule for rule in rules.values()},
            drivers={
                rule.slot: self.driver if rule.terms is None else EventDriver() for rule in rules.values()
            },
            journal=self.journal,
            clock=self.clock,
            timers=self.timers,
            ids=self.ids,
            spawns=self.spawns,
            teardowns=self.teardowns,
            reads=self.reads,
            access={rule.slot: NoAccess() for rule in rules.values()},
            link=NoLink(),
            crash=self.points,
            pool=self.pool,
            new_abort=threading.Event,
            link_up_since_s=lambda: 0.0,
            fatal=self.fatal.append,
            pools={NETWORK: POOL},
            occupied=lambda _: OCCUPIED,
        )
        self.fleet = Fleet(
            self.world,
            Routing(
                scalers=tuple(
                    RoutableScaler(name=name, backend=rule.backend, label_sets=(("linux", name),))
                    for name, rule in rules.items()
                ),
                rules=rules,
                resources=dict.fromkeys(rules, (None,)),
            ),
        )
        self.supervisor = Supervisor(self.world, settle=self._settle)
        applied = ConfigApplied(digest="d1", global_max_agents=GLOBAL_MOST, scalers={})
        started = Started(host="h1", boot_id=self.host.boot_id, pid=self.crashes + 1, version="test")
        self.supervisor.boot(self.fold, applied, started)
        self.taken_up += len(self.supervisor.taken_up)

    def _rules(self, name: str, most: int) -> ScalerRules:
        rules = ScalerRules(
            name=name,
            backend="bare-metal",
            slot=slot_of(name),
            max_agents=most,
            max_concurrent_spawns=2,
            spawn_timeout_s=60,
            register_timeout_s=120,
            heartbeat_grace_s=self.grace_s,
            network=NETWORK if name == "small" else "",
        )
        if name != CLOUD:
            return rules
        return msgspec.structs.replace(
            rules, backend=BACKEND, targets=(TARGET,), terms=TERMS, max_concurrent_spawns=1
        )

    def _settle(self, done: Callable[[], bool]) -> None:
        while not done() and self.acknowledgements.run():
            pass

    def _reach_driver(self, name: str) -> None:
        self.points.reach(name)

    def crash(self) -> None:
        """SIGKILL: everything in memory is gone, the log and the host stay; then start again."""
        self.crashes += 1
        self.driver.close()
        for ref in ActorRegistry.get_all():
            ActorRegistry.unregister(ref)
        self.journal.unavailable(down=False)
        self.boot()

    # Steps.

    def step(self) -> bool:
        """Let one thing happen, of those that can; False when nothing is due before time moves."""
        self.steps += 1
        sources = [
            self.pool.run_turn,
            self.pool.run_turn,
            self.acknowledgements.run,
            self.spawns.run,
            self.teardowns.run,
            self.reads.run,
            self.timers.fire,
        ]
        self.chance.shuffle(sources)
        try:
            moved = any(source() for source in sources)
        except Crashed:
            moved = True
        if self.points.died:
            self.crash()
        if self.fatal and self.bugs:
            self.crash()  # what the process does when one of its actors keeps dying
        assert not self.fatal, self.fatal
        return moved

    def settle(self, most: int = 20_000) -> None:
        """Let everything happen that needs no time to pass."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError("the simulation does not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire one by one, each to its end."""
        end = self.clock.elapsed_s + seconds
        while True:
            self.settle()
            due = self.timers.next_at()
            if due is None or due > end:
                break
            self.clock.elapsed_s = max(self.clock.elapsed_s, due)
        self.clock.elapsed_s = end
        self.settle()

    def provision(self, most: int = 1000) -> None:
        """Let the provisioner do all that it is told, and the coordinator hear of it."""
        self.cloud.diligent = True
        for _ in range(most):
            self.settle()
            if not self.cloud.work():
                return
        raise AssertionError("the provisioner does not come to rest")

    # What people and agents do.

    def tell(self, ref: Any, command: Any) -> list[Any]:
        """Send a command as a front door would; the list gets the answer."""
        answer: list[Any] = []
        if ref is not None:
            tell(ref, Call(command, reply=answer.append))
        return answer

    def demand(self, scaler: str, count: int = 1, job: str | None = None) -> list[Any]:
        """Ask for agents."""
        wanted = Demand(id=self.ids.random(), labels=("linux", scaler), count=count, job=job)
        routed = self.fleet.route(wanted)
        assert not isinstance(routed, Answer)
        return self.tell(self.world.router.allocator, routed)

    def register(self, vm: str, session: str | None = None) -> list[Any]:
        """Let the machine's agent register."""
        command = RegisterAgent(vm=vm, session=session or f"session-of-{vm}")
        return self.tell(self.world.router.vms.get(vm), command)

    def done(self, vm: str, exit_code: int = 0) -> list[Any]:
        """Let the machine's agent say done."""
        return self.tell(
            self.world.router.vms.get(vm), AgentDone(vm=vm, session=f"session-of-{vm}", exit_code=exit_code)
        )

    def acked(self, vm: str) -> None:
        """Let the agent acknowledge its configuration."""
        self.tell(self.world.router.vms.get(vm), NoteConfigAcked(session=f"session-of-{vm}"))

    def append(self, aggregate: str, event: AnyEvent, writer: str = "c2") -> None:
        """Append a fact as another process does."""
        there = self.journal.read(aggregate)
        last = (there[-1].version, there[-1].sequence) if there else (0, 0)
        decision = Decision(
            attempt=self.ids.random(),
            at=self.clock.now(),
            writer=writer,
            cause="test",
            correlation="test",
            facts=following(aggregate, *last, [event]),
        )
        self.journal.append(decision, lambda _: None)
        while self.acknowledgements.run():
            pass

    def _provisioned(self, said: ReportProvision) -> list[Any]:
        ref = self.world.router.vms.get(said.vm)
        if ref is not None:
            return self.tell(ref, said)
        try:
            return [self.fleet.provisioned(said)]
        except (Refused, LogUnavailable) as error:
            return [error]

    def beat(self, vm: str) -> None:
        """Let the agent beat."""
        self.fleet.beat(vm, f"session-of-{vm}")

    def remove(self, vm: str, *, force: bool) -> list[Any]:
        """Let an operator remove the machine."""
        return self.tell(self.world.router.vms.get(vm), RemoveAgent(vm=vm, by="operator", force=force))

    def gate(self, scaler: str, gate: Any) -> list[Any]:
        """Let an operator pause, drain or resume a scaler."""
        ref = self.world.router.backends[slot_of(scaler)]
        return self.tell(ref, SetGate(scaler=scaler, gate=gate, by="operator"))

    def running(self) -> list[str]:
        """Return the machines that run on the host."""
        return sorted(vm for vm, machine in self.host.machines.items() if machine.state == "running")

    # What must always hold.

    def fold(self) -> FleetState:
        """Fold the log afresh."""
        return fold_fleet(self.journal.replay())

    def check_log(self) -> None:
        """Check the promises that every prefix of the log keeps."""
        live: dict[str, str] = {}
        taken: dict[str, str] = {}
        leased: dict[str, str] = {}
        spawned: set[str] = set()
        for fact in self.journal.replay():
            vm = fact.aggregate.removeprefix("vm.")
            match fact.tag:
                case "backend.slot_taken":
                    taken[fact.event.vm] = fact.aggregate
                case "vm.requested":
                    live[vm] = fact.event.slot
                    assert taken[vm] == fact.event.slot
                    assert leased.get(vm, "") == fact.event.address
                case "allocator.leased":
                    address = fact.event.address
                    assert address not in leased.values(), f"{address} was handed out twice"
                    assert address not in OCCUPIED | {POOL.gateway}, f"{address} is not ours to give"
                    leased[fact.event.vm] = address
                case "vm.reaped":
                    leased.pop(vm, None)
                    del live[vm]
                    del taken[vm]
                case "vm.spawned":
                    assert isinstance(fact.event, Spawned)
                    assert vm not in spawned, f"{vm} spawned twice"
                    spawned.add(vm)
                case _:
                    pass
            assert len(live) <= GLOBAL_MOST, "the global cap was exceeded"
            for name, most in SCALERS.items():
                slot = slot_of(name)
                assert sum(s == slot for s in live.values()) <= most, f"the cap of {name} was exceeded"
        assert taken == live, "reservations are not the live set"

    def check_cloud(self) -> None:
        """Check what provisioners are told: one start each, an end only for what was started and is over."""
        asked: set[str] = set()
        over: set[str] = set()
        for fact in self.journal.replay():
            match fact.event:
                case Up(agent=vm):
                    assert vm not in asked, f"{vm} was asked for twice"
                    asked.add(vm)
                case Down(agent=vm):
                    assert vm in asked, f"the end of {vm} was told before its start"
                    assert vm in over, f"{vm} is to be ended, and its life is not over"
                case Draining() | Failed():
                    over.add(fact.aggregate.removeprefix("vm."))
                case Reaped():
                    vm = fact.aggregate.removeprefix("vm.")
                    assert vm not in self.cloud.running, f"{vm} was reaped and runs"
                case _:
                    pass

    def check_actors(self) -> None:
        """Check, at rest, that what actors hold is what the log says."""
        state = self.fold()
        allocator = self.world.router.allocator
        assert allocator is not None
        actor = allocator._actor_weakref()
        assert actor is not None
        for slot, folded in state.backends.items():
            held = actor.backends[slot]
            assert set(held.slots) == set(folded.slots), (slot, set(held.slots), set(folded.slots))
            assert (held.gate, held.version) == (folded.gate, folded.version)
        assert actor.coordinator.slots == frozenset(state.vms)
        folded_network, held_network = state.allocators.get(NETWORK), actor.allocators[NETWORK]
        if folded_network is not None:
            assert held_network.leases == folded_network.leases
            assert held_network.version == folded_network.version
        assert set(self.world.router.vms) == set(state.vms)

    def check_nothing_left(self) -> None:
        """Check that every life came to its end and the host is empty."""
        state = self.fold()
        assert not state.vms, {vm: (s.phase, s.detail) for vm, s in state.vms.items()}
        assert not self.host.machines, self.host.machines
        assert not self.cloud.running, self.cloud.running


def slot_of(scaler: str) -> str:
    """Return the aggregate of a scaler's slots."""
    return subjects.event_backend(scaler) if scaler == CLOUD else subjects.local_backend("c1", scaler)


def refused(answer: list[Any]) -> str | None:
    """Return the code of a refusal."""
    return answer[0].code if answer and isinstance(answer[0], Refused) else None

"""Boot, recovery, the restart of a dead actor from its log, and the orderly end."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from actors.allocator import AllocatorActor, replaced
from actors.backend import BackendActor
from actors.decisions.capacity import ScalerRules
from actors.decisions.recovery import Action, action
from actors.decisions.vm import End
from actors.errors import Conflict, LogUnavailable, Refused
from actors.host import Caring, HostActor
from actors.machine import Resume
from actors.pooled import PooledActor
from actors.ports import Appended, Conflicted, Decision, NewFact, NotAppended, Outcome, following
from actors.vm import VmActor
from actors.world import Call, World, tell
from events import subjects
from events.coordinator import ConfigApplied, CoordinatorEvent, Started, Stopped
from events.envelope import Recorded
from projections import allocator, backend, coordinator
from projections.allocator import AllocatorState
from projections.backend import BackendState
from projections.boot import FleetState
from projections.coordinator import CoordinatorState
from projections.vm import VmState, fold

logger = logging.getLogger(__name__)

RESTARTS_MOST = 3
RESTART_WINDOW_S = 60.0
"""An actor that dies more often than this many times in the window is given up: its machine is failed, with the reason."""

RESTART_RETRY_S = 1.0
BOOT_TRIES = 5


class Supervisor:
    """Starts every actor from the log and starts it again when it dies.

    `boot` is called once, before the front doors open. Deaths are handled in the reads pool, never on an actor's
    thread.
    """

    def __init__(
        self,
        world: World,
        *,
        settle: Callable[[Callable[[], bool]], None],
        prepare: Callable[[FleetState], None] = lambda _: None,
    ) -> None:
        """Take the world, and how to wait for something that other threads bring about.

        `prepare` is called at boot when the fleet is known for good and before any actor lives.
        """
        self.world = world
        self._prepare = prepare
        self._settle = settle
        self._deaths: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self.started_at_sequence = 0  # of our own `coordinator.started`
        self.taken_up: list[str] = []
        self.restarts = 0
        self.caring: Caring | None = None  # None: nobody reclaims on this host
        world.pool.on_death = self._on_death
        world.router.begin = self._begin

    # Boot.

    def boot(self, load: Callable[[], FleetState], applied: ConfigApplied, started: Started) -> None:
        """Bring the fleet of the log back to life.

        `load` folds the log as of now. An append of the process before us may land between that and
        `coordinator.started`: then the fleet is folded again. After it, nothing of that process is taken.

        Raises:
            LogUnavailable: the log would not take `coordinator.started`.
            Conflict: somebody else keeps writing as this coordinator.
        """
        for _ in range(BOOT_TRIES):
            fleet = load()
            try:
                mine = self._announce(fleet, applied, started)
            except Conflict as conflict:
                logger.warning("the log moved while it was folded, folding again: %s", conflict)
            else:
                self._begin_fleet(fleet, mine)
                return
        name = self.world.site.coordinator
        raise Conflict(f"another process keeps writing as coordinator {name}: give each one its own --id")

    def _begin_fleet(self, fleet: FleetState, mine: CoordinatorState) -> None:
        self._prepare(fleet)
        backends = {slot: fleet.backends.get(slot, BackendState()) for slot in self.world.rules}
        for slot, rules in self.world.rules.items():
            self._start_backend(slot, rules, backends[slot])
        self._start_allocator(mine, backends, fleet.allocators)
        for state in fleet.vms.values():
            if state.owner == self.world.site.coordinator and state.slot in self.world.drivers:
                self._look_and_begin(state)
        if self.caring is not None:
            self._start_host(self.caring)

    def _announce(self, fleet: FleetState, applied: ConfigApplied, started: Started) -> CoordinatorState:
        site = self.world.site
        state = fleet.coordinators.get(site.coordinator, CoordinatorState())
        events: list[CoordinatorEvent] = [started]
        if state.digest != applied.digest:
            events.append(applied)
        aggregate = subjects.coordinator(site.coordinator)
        facts = following(aggregate, state.version, state.sequence, events)
        stored = self._append_now(facts, "boot")
        self.started_at_sequence = stored[0].sequence
        for fact in stored:
            state = coordinator.evolve(state, fact.event, fact)
        return state

    def heed(self, fact: Recorded) -> None:
        """Look at a fact of the log, whoever wrote it: stop when another process started with our id."""
        if self._is_successor(fact):
            self.world.fatal(replaced(self.world.site.coordinator, fact))

    def _is_successor(self, fact: Recorded) -> bool:
        own = subjects.coordinator(self.world.site.coordinator)
        later = fact.sequence > self.started_at_sequence
        return later and fact.aggregate == own and isinstance(fact.event, Started)

    def _append_now(self, facts: tuple[NewFact, ...], cause: str) -> tuple[Recorded, ...]:
        """Append outside any actor, and wait.

        Raises:
            LogUnavailable: the log did not take it; the message has the reason.
        """
        world = self.world
        attempt = world.ids.random()
        decision = Decision(
            attempt=attempt,
            at=world.clock.now(),
            writer=world.site.coordinator,
            cause=cause,
            correlation=attempt,
            facts=facts,
            teardown=True,
        )
        for _ in range(BOOT_TRIES):
            outcomes: list[Outcome] = []
            world.journal.append(decision, outcomes.append)
            self._settle(lambda: bool(outcomes))  # noqa: B023 - called before the next round
            match outcomes:
                case [Appended(facts=stored)]:
                    return stored
                case [Conflicted(detail=detail)]:
                    raise Conflict(detail)
                case [NotAppended(stored=False, detail=detail)]:
                    raise LogUnavailable(
                        f"the log did not take {facts[0].event.__struct_config__.tag}: {detail}"
                    )
                case _:
                    pass  # not known: the same attempt again finds out, or stores it
        raise LogUnavailable(f"the log did not say whether it took {facts[0].event.__struct_config__.tag}")

    def _start_backend(self, slot: str, rules: ScalerRules, state: BackendState) -> None:
        self.world.router.backends[slot] = self.world.pool.start(BackendActor, self.world, rules, state)

    def _start_allocator(
        self,
        mine: CoordinatorState,
        backends: dict[str, BackendState],
        allocators: dict[str, AllocatorState],
    ) -> None:
        own = {key: allocators.get(key, AllocatorState()) for key in self.world.pools}
        self.world.router.allocator = self.world.pool.start(AllocatorActor, self.world, mine, backends, own)

    def _begin(self, state: VmState) -> None:
        """Start the actor of a machine that was just requested, and whose turn may have come with that."""
        self._start_vm(state, Resume("spawn" if state.phase == "starting" else "wait-turn"))

    def _start_vm(self, state: VmState, resume: Resume) -> None:
        router = self.world.router
        ref = self.world.pool.start(VmActor, self.world, state)
        router.slots[state.id] = state.slot
        router.vms[state.id] = ref
        tell(ref, resume)

    def _look_and_begin(self, state: VmState) -> None:
        """Ask the host about one machine and start its actor with what the recovery table says."""
        found = self.world.drivers[state.slot].inspect(state.id, state.placement, state.handle)
        what: Action = action(state, found, self.world.site.boot_id)
        if what == "take-up":
            self.taken_up.append(state.id)
        self._start_vm(state, Resume(what, found))

    def _start_host(self, caring: Caring) -> None:
        self.world.router.host = self.world.pool.start(HostActor, self.world, caring)

    # Death and restart.

    def _on_death(self, actor: PooledActor, error: BaseException) -> None:
        if self._stopping:
            return
        logger.error("%s died and is started again from the log", actor, exc_info=error)
        self._submit(lambda: self._restart(actor, error))

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self.world.reads.submit(work)
        except Refused:
            self.world.timers.set(f"supervisor:{id(work)}", RESTART_RETRY_S, lambda: self._submit(work))

    def _restart(self, actor: PooledActor, error: BaseException) -> None:
        if self._stopping:
            return
        self.restarts += 1
        try:
            match actor:
                case VmActor():
                    self._restart_vm_after_its_spawn(actor.state.id, error)
                case BackendActor():
                    self._restart_backend(actor.rules)
                case AllocatorActor():
                    self._restart_allocator()
                case HostActor():
                    self._start_host(actor.caring)
                case _:
                    logger.error("%s is of no kind the supervisor starts again", actor)
        except LogUnavailable as unavailable:
            logger.warning("%s waits for the log to be started again: %s", actor, unavailable)
            self.world.timers.set(
                f"supervisor:{actor.actor_urn}",
                RESTART_RETRY_S,
                lambda: self._submit(lambda: self._restart(actor, error)),
            )

    def _too_often(self, key: str) -> bool:
        now_s = self.world.clock.monotonic_s()
        with self._lock:
            deaths = self._deaths.setdefault(key, deque(maxlen=RESTARTS_MOST + 1))
            deaths.append(now_s)
            return len(deaths) > RESTARTS_MOST and now_s - deaths[0] <= RESTART_WINDOW_S

    def _restart_vm_after_its_spawn(self, vm: str, error: BaseException) -> None:
        """Call off a spawn the dead actor began and wait for its end: a host looked at meanwhile would mislead."""
        flight = self.world.in_flight.get(vm)
        if flight is None:
            self._restart_vm(vm, error)
            return
        flight.abort.set()
        again = f"supervisor:{vm}:spawn"
        self.world.timers.set(
            again,
            RESTART_RETRY_S,
            lambda: self._submit(lambda: self._restart_vm_after_its_spawn(vm, error)),
        )

    def _restart_vm(self, vm: str, error: BaseException) -> None:
        facts = self.world.journal.read(subjects.vm(vm))
        state = fold(facts)
        self.world.router.vms.pop(vm, None)
        # It may have died between the append and telling the others; folds take a repeated fact once.
        self.world.router.publish(facts, None)
        if state is None or not state.live:
            self.world.router.slots.pop(vm, None)
            return
        if self._too_often(vm):
            if state.ended:
                logger.critical(
                    "the actor of %s dies in its teardown; left as it is until the next start", vm
                )
                return
            self._start_vm(state, Resume("nothing"))
            end = End(
                reason="supervision", detail=f"its actor died {RESTARTS_MOST + 1} times: {error}", failed=True
            )
            self.world.router.tell_vm(vm, Call(end, cause="supervisor"))
            return
        self._look_and_begin(state)

    def _fold_backend(self, slot: str) -> BackendState:
        """Fold a scaler's own facts, then those of the machines that may still hold a slot of it."""
        state = BackendState()
        for fact in self.world.journal.read(slot):
            state = backend.evolve(state, fact.event, fact)
        for vm in sorted(state.slots):
            for fact in self.world.journal.read(subjects.vm(vm)):
                state = backend.evolve_vm(state, fact.event, fact)
        return state

    def _fold_allocator(self, network: str) -> AllocatorState:
        """Fold a network's own facts, then those of the machines that may still hold an address of it."""
        state = AllocatorState()
        for fact in self.world.journal.read(network):
            state = allocator.evolve(state, fact.event, fact)
        for vm in set(state.leases.values()):
            for fact in self.world.journal.read(subjects.vm(vm)):
                state = allocator.evolve_vm(state, fact.event, fact)
        return state

    def _restart_backend(self, rules: ScalerRules) -> None:
        self._give_up_if_hopeless(rules.slot)
        state = self._fold_backend(rules.slot)
        self._start_backend(rules.slot, rules, state)
        self._tell_again((rules.slot,), state)
        for vm in sorted(state.slots):
            self.world.router.tell_vm(vm, Resume("wait-turn"))

    def _restart_allocator(self) -> None:
        self._give_up_if_hopeless("allocator")
        backends = {slot: self._fold_backend(slot) for slot in self.world.rules}
        own = subjects.coordinator(self.world.site.coordinator)
        mine = CoordinatorState()
        for fact in self.world.journal.read(own):
            mine = coordinator.evolve(mine, fact.event, fact)
        held = frozenset(vm for state in backends.values() for vm in state.slots)
        for vm in mine.slots - held:
            for fact in self.world.journal.read(subjects.vm(vm)):
                mine = coordinator.evolve_vm(mine, fact.event, fact)
        self._start_allocator(mine, backends, {pool: self._fold_allocator(pool) for pool in self.world.pools})
        self._tell_again((*backends, *self.world.pools), *backends.values())
        for vm in held - self.world.router.vms.keys():  # requested by its last append, and not begun
            state = fold(self.world.journal.read(subjects.vm(vm)))
            if state is not None and state.live:
                self._look_and_begin(state)

    def _tell_again(self, slots: tuple[str, ...], *states: BackendState) -> None:
        """Tell scalers and allocator once more what the log says of these slots.

        Facts published between the fold and the new actor's start went to the dead one, and what the dead one
        appended last it may have told nobody. Folds take a repeated fact once.
        """
        vms = (subjects.vm(vm) for state in states for vm in sorted(state.slots))
        for aggregate in (*slots, *vms):
            self.world.router.publish(self.world.journal.read(aggregate), None)

    def _give_up_if_hopeless(self, key: str) -> None:
        if self._too_often(key):
            self.world.fatal(f"{key} died more than {RESTARTS_MOST} times in {RESTART_WINDOW_S:g} s")

    # End.

    def stop(self, reason: str, *, timeout_s: float = 15.0) -> None:
        """Stop the actors; machines run on and are taken up again at the next start. Repeatable."""
        if self._stopping:
            return
        self._stopping = True
        try:
            self._append_stopped(reason)
        except (LogUnavailable, Conflict) as error:
            logger.warning("stopping without a fact of it: %s", error)
        self.world.pool.stop(timeout_s=timeout_s)

    def _append_stopped(self, reason: str) -> None:
        aggregate = subjects.coordinator(self.world.site.coordinator)
        facts = self.world.journal.read(aggregate)
        if any(self._is_successor(fact) for fact in facts):
            return  # it runs, under our id: that we stop is no fact of the log
        last = facts[-1]
        stopped = following(aggregate, last.version, last.sequence, [Stopped(reason=reason)])
        self._append_now(stopped, "shutdown")

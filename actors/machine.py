"""What is done to one machine, off its actor's thread: every way out is a command told to its actor."""

import contextlib
import logging
from typing import Any, NamedTuple

from actors.decisions.recovery import Action, action
from actors.decisions.vm import NoteExit, NoteSpawned, NoteSpawnFailed, NoteTeardownFailed, NoteTornDown
from actors.driver import Driver, Found, SpawnOrder
from actors.errors import DriverError, Refused
from actors.world import Call, InFlight, World
from events import subjects
from events.vm import Handle
from projections.vm import VmState

logger = logging.getLogger(__name__)


class Resume(NamedTuple):
    """What a machine's actor does next, and what the host showed."""

    action: Action
    found: Found | None = None


class Machine:
    """The effects of one machine's actor. Each returns at once; work that finds no room raises `Refused`."""

    def __init__(self, world: World, driver: Driver, vm: str) -> None:
        self._world = world
        self._driver = driver
        self._vm = vm
        self._watched = False
        self.tearing_down = False

    @property
    def flight(self) -> InFlight | None:
        """The spawn of this machine that runs now, whoever began it."""
        return self._world.in_flight.get(self._vm)

    def spawn(self, state: VmState) -> None:
        """Bring it up."""
        world = self._world
        assert self.flight is None, f"{self._vm} is being spawned already"
        flight = InFlight(abort=world.new_abort())
        world.in_flight[self._vm] = flight

        def work() -> None:
            outcome = _spawn(world, self._driver, state, flight)
            del world.in_flight[self._vm]
            self._tell(state, outcome)

        try:
            world.spawns.submit(work)
        except Refused:
            del world.in_flight[self._vm]
            raise

    def tear_down(self, state: VmState, handle: Handle | None) -> None:
        """Take it down."""

        def work() -> None:
            self._tell(state, _tear_down(self._world, self._driver, state, handle))

        self.tearing_down = True
        try:
            self._world.teardowns.submit(work)
        except Refused:
            self.tearing_down = False
            raise

    def watch(self, state: VmState, handle: Handle) -> None:
        """Be told when it ends. Once is enough."""
        if self._watched:
            return
        self._watched = True
        router, vm = self._world.router, self._vm

        def ended(how: Any) -> None:
            router.tell_vm(vm, Call(NoteExit(exit_code=how.exit_code, detail=how.detail), cause="host"))

        self._driver.watch(vm, state.placement, handle, ended)

    def clear_bootstrap(self, state: VmState) -> None:
        """Clear what was left for its agent to read. If there is no room for it now, it stays until teardown."""
        handle = state.handle
        if handle is None:
            return
        with contextlib.suppress(Refused):
            self._world.reads.submit(lambda: self._driver.clear_bootstrap(state.id, state.placement, handle))

    def inspect(self, state: VmState) -> None:
        """Ask the host what became of it."""
        world = self._world

        def work() -> None:
            found = self._driver.inspect(state.id, state.placement, state.handle)
            world.router.tell_vm(self._vm, Resume(action(state, found, world.site.boot_id), found))

        world.reads.submit(work)

    def _tell(self, state: VmState, outcome: Any) -> None:
        self._world.router.tell_vm(self._vm, Call(outcome, cause=f"{subjects.vm(state.id)}:{state.version}"))


def _spawn(world: World, driver: Driver, state: VmState, flight: InFlight) -> NoteSpawned | NoteSpawnFailed:
    world.crash.reach("spawn:before")
    try:
        order = SpawnOrder(
            vm=state.id,
            scaler=state.scaler,
            labels=state.labels,
            placement=state.placement,
            environment=world.access[state.slot].environment(state.id, state.agent_labels or state.labels),
            limits=state.limits,
        )
        handle = driver.spawn(order, flight.abort)
    except DriverError as error:
        return NoteSpawnFailed.of(error)
    except Refused as refused:
        return NoteSpawnFailed(kind="refused", detail=str(refused), transient=False)
    except Exception as error:
        logger.exception("the driver broke while it spawned %s", state.id)
        return NoteSpawnFailed(kind="unknown", detail=f"{type(error).__name__}: {error}", transient=True)
    finally:
        world.crash.reach("spawn:after")
    return NoteSpawned(handle=handle)


def _tear_down(
    world: World, driver: Driver, state: VmState, handle: Handle | None
) -> NoteTornDown | NoteTeardownFailed:
    world.crash.reach("teardown:before")
    try:
        evidence = driver.destroy(state.id, state.placement, handle, world.new_abort())
    except DriverError as error:
        return NoteTeardownFailed(detail=f"{error.kind}: {error}")
    except Exception as error:
        logger.exception("the driver broke while it tore down %s", state.id)
        return NoteTeardownFailed(detail=f"{type(error).__name__}: {error}")
    finally:
        world.crash.reach("teardown:after")
    return NoteTornDown(evidence=evidence)

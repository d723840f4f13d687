"""The actor of one host: sweeps, reaps and operators' stops, one at a time, whatever becomes of each."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from actors.allocator import Leases
from actors.decisions.reclaim import LiveMachine, Standing
from actors.errors import LogUnavailable, Refused
from actors.pooled import PooledActor
from actors.ports import Effects
from actors.sweep import Report, Stopped, Sweeper, say
from actors.world import Call, Reply, World, tell
from events import subjects
from projections.vm import BrokenLog, VmState, fold

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 900.0
WAITING_MOST = 64
LEASES_S = 10.0
"""How long the addresses held are waited for; without them nothing on the network is touched."""

_TIMER = "host:sweep"


class SweepNow(NamedTuple):
    """Take away what is nobody's."""

    why: str
    reply: Reply | None = None
    dry_run: bool = False


class ListLive(NamedTuple):
    """Say which machines run here."""

    reply: Reply


class StopLive(NamedTuple):
    """End this living machine, if nobody accounts for it."""

    vm: str
    by: str
    reply: Reply


class ReapUnowned(NamedTuple):
    """Be rid of a machine that its sender has proven to be nobody's."""

    vm: str
    reply: Reply | None = None


class _Done(NamedTuple):
    """What was under way is over."""


Task = SweepNow | ListLive | StopLive | ReapUnowned


class LogLedger:
    """What this coordinator knows: its living actors, the log for all others, its allocator for addresses."""

    def __init__(self, world: World) -> None:
        self._world = world

    def standing(self, vm: str) -> Standing:
        """Return what the log says of the machine."""
        if vm in self._world.router.slots:
            return "live"
        try:
            return standing_in_log(self._world, vm)
        except (LogUnavailable, BrokenLog) as error:
            logger.warning("%s is spared, its facts could not be read: %s", vm, error)
            return "unread"

    @contextmanager
    def withholding(self, addresses: frozenset[str]) -> Iterator[frozenset[str] | None]:
        """Have the allocator give none of these away, and ask which it has given: what it was deciding counts."""
        router = self._world.router
        router.withheld |= addresses
        try:
            yield self._leases()
        finally:
            router.withheld -= addresses

    def _leases(self) -> frozenset[str] | None:
        if not self._world.pools:
            return frozenset()
        allocator = self._world.router.allocator
        asked: Future[frozenset[str]] = Future()

        def answer(result: Any) -> None:
            if isinstance(result, BaseException):
                asked.set_exception(result)
            else:
                asked.set_result(result)

        if allocator is None or not tell(allocator, Call(Leases(), reply=answer)):
            return None
        try:
            return asked.result(timeout=LEASES_S)
        except Exception as error:  # noqa: BLE001 - without them nothing of the network may be touched, whyever
            logger.warning("the addresses held are not known, the network is spared: %r", error)
            return None


class BootLedger(LogLedger):
    """What is known before any actor lives: the fleet as it was folded, and the log."""

    def __init__(self, world: World, vms: Mapping[str, VmState], leased: frozenset[str]) -> None:
        super().__init__(world)
        self._vms = vms
        self._leased = leased

    def standing(self, vm: str) -> Standing:
        """Return what the log says of the machine."""
        return "live" if vm in self._vms else super().standing(vm)

    @contextmanager
    def withholding(self, addresses: frozenset[str]) -> Iterator[frozenset[str] | None]:
        """Give what the fold holds: there is no actor yet that could give an address away."""
        del addresses
        yield self._leased


def standing_in_log(world: World, vm: str) -> Standing:
    """Return what the log itself says of a machine.

    Raises:
        LogUnavailable, BrokenLog: it does not say.
    """
    state = fold(world.journal.read(subjects.vm(vm)))
    if state is None:
        return "absent"
    return "live" if state.live else "reaped"


class Caring(NamedTuple):
    """What the host's actor works with; `done` is told of every sweep, from the thread it ran on."""

    sweeper: Sweeper
    effects: (
        Effects  # of width one: also an actor that was started again waits for what its predecessor began
    )
    done: Callable[[Report], None]
    every_s: float = SWEEP_EVERY_S


class HostActor(PooledActor):
    """Serves one task after the other, in the order they came; at most `WAITING_MOST` wait.

    A task that fails is told to who asked and to nobody else: the next one is begun all the same.
    """

    def __init__(self, world: World, caring: Caring) -> None:
        super().__init__()
        self.world = world
        self.caring = caring
        self._ledger = LogLedger(world)
        self._waiting: deque[Task] = deque()
        self._busy = False

    def on_start(self) -> None:
        """Begin to sweep by the clock."""
        self._set_timer()

    def on_receive(self, message: Any) -> None:
        """Take a task, or go on with the next one."""
        match message:
            case _Done():
                self._busy = False
            case SweepNow() | ListLive() | StopLive() | ReapUnowned():
                self._take(message)
            case _:
                raise AssertionError(f"the host's actor knows no {message!r}")
        self._begin_next()

    def _take(self, task: Task) -> None:
        if isinstance(task, SweepNow) and task.reply is None:
            self._set_timer()
            if any(isinstance(each, SweepNow) for each in self._waiting):
                return  # one that waits serves for both
        if len(self._waiting) >= WAITING_MOST:
            if task.reply is not None:
                task.reply(Refused("overloaded", "too much waits for this host already: ask again later"))
            return
        self._waiting.append(task)

    def _begin_next(self) -> None:
        if self._busy or not self._waiting:
            return
        task = self._waiting.popleft()
        self._busy = True
        try:
            self.caring.effects.submit(lambda: self._carry_out(task))
        except Refused as refused:
            self._busy = False
            if task.reply is not None:
                task.reply(refused)

    def _carry_out(self, task: Task) -> None:
        """Run in the effects' thread, and say that it is over, whatever happened."""
        result: Any
        try:
            result = self._result(task)
        except Exception as error:
            logger.warning(
                "%s failed: %s", type(task).__name__, error, exc_info=not isinstance(error, Refused)
            )
            result = error
        try:
            if task.reply is not None:
                task.reply(result)
        finally:
            tell(self.actor_ref, _Done())

    def _result(self, task: Task) -> Report | tuple[LiveMachine, ...] | Stopped | bool:
        sweeper = self.caring.sweeper
        match task:
            case SweepNow(why=why, dry_run=dry_run):
                return self._sweep(why, dry_run=dry_run)
            case ListLive():
                return sweeper.live(self._ledger)
            case StopLive(vm=vm, by=by):
                stopped = sweeper.stop(vm, self._ledger)
                logger.warning("stop of %s asked for by %s: %s, %s", vm, by, stopped.outcome, stopped.detail)
                if stopped.outcome == "stopped":
                    self._sweep(f"after the stop of {vm}")  # its address is nobody's now
                return stopped
            case ReapUnowned(vm=vm):
                gone = sweeper.reap_unowned(vm, self._ledger)
                if gone:
                    self._sweep(f"after {vm} was reaped")
                return gone

    def _sweep(self, why: str, *, dry_run: bool = False) -> Report:
        report = self.caring.sweeper.sweep(self._ledger, dry_run=dry_run)
        if not dry_run:
            say(report, why)
            self.caring.done(report)
        return report

    def _set_timer(self) -> None:
        ref = self.actor_ref
        self.world.timers.set(_TIMER, self.caring.every_s, lambda: _again(ref))


def _again(ref: Any) -> None:
    tell(ref, SweepNow(why="by the clock"))


class Host:
    """The front door of the host's actor: asks it and waits, with a deadline."""

    def __init__(self, world: World, *, answer_s: float = 30.0) -> None:
        self._world = world
        self._answer_s = answer_s

    def sweep(self, why: str, *, dry_run: bool = False, timeout_s: float | None = None) -> Report:
        """Sweep now, and return what was done."""
        report: Report = self._ask(lambda reply: SweepNow(why, reply, dry_run), timeout_s)
        return report

    def live(self, timeout_s: float | None = None) -> tuple[LiveMachine, ...]:
        """Return the machines that run here."""
        found: tuple[LiveMachine, ...] = self._ask(ListLive, timeout_s)
        return found

    def stop(self, vm: str, by: str, timeout_s: float | None = None) -> Stopped:
        """End a living machine that nobody accounts for."""
        stopped: Stopped = self._ask(lambda reply: StopLive(vm, by, reply), timeout_s)
        return stopped

    def reap_unowned(self, vm: str, timeout_s: float | None = None) -> bool:
        """Be rid of a machine that is proven to be nobody's; return whether it is gone."""
        gone: bool = self._ask(lambda reply: ReapUnowned(vm, reply), timeout_s)
        return gone

    def _ask(self, task: Callable[[Reply], Task], timeout_s: float | None) -> Any:
        """Ask and wait.

        Raises:
            TimeoutError: what holds the host has not let go yet; what was asked for may still be done.
        """
        asked: Future[Any] = Future()

        def answer(result: Any) -> None:
            if isinstance(result, BaseException):
                asked.set_exception(result)
            else:
                asked.set_result(result)

        host = self._world.router.host
        if host is None or not tell(host, task(answer)):
            raise Refused("unavailable", "the host's actor has just ended: ask again in a moment")
        wait_s = self._answer_s if timeout_s is None else timeout_s
        try:
            return asked.result(timeout=wait_s)
        except TimeoutError:
            raise TimeoutError(
                f"the host was not done within {wait_s:g} s: what was asked for may still be done, its log tells"
            ) from None

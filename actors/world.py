"""What every actor is handed: the ports, where it stands, and the index by which actors find one another."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pykka import ActorDeadError, ActorRef

from actors.decisions.addresses import AddressPool
from actors.decisions.capacity import ScalerRules, Site
from actors.driver import Abort, Driver
from actors.pooled import ActorPool
from actors.ports import AgentAccess, AgentLink, Clock, CrashPoints, Effects, Ids, Journal, Timers
from events.envelope import Recorded
from events.vm import Reaped, Requested
from projections.headroom import concerned
from projections.vm import VmState

logger = logging.getLogger(__name__)

Reply = Callable[[Any], None]
"""Takes the result, or the exception that is the answer. Called once, from an actor: it must not block."""


class Call(NamedTuple):
    """A command on its way to an actor, with who waits for the answer and what led to it."""

    command: Any
    reply: Reply | None = None
    cause: str = ""
    correlation: str = ""


class Observed(NamedTuple):
    """A fact that was appended by somebody else than the actor it is told to."""

    fact: Recorded


class Due(NamedTuple):
    """A machine's timer went off."""

    what: str


class Enlist(NamedTuple):
    """A machine waits for its turn in its scaler's throttle."""

    vm: str


@dataclass
class InFlight:
    """A spawn that runs in the effects pool now: at most one per machine, whatever becomes of its actor."""

    abort: Abort


class Router:
    """The index of living actors, by what they are for. pykka's registry is a list: never searched here.

    Written by whoever starts or buries an actor, read from any thread; every operation is one dict access.
    """

    def __init__(self) -> None:
        self.vms: dict[str, ActorRef[Any]] = {}
        self.slots: dict[str, str] = {}  # vm -> backend aggregate
        self.sessions: dict[str, str] = {}  # vm -> its registered agent's session, while the life lasts
        self.heard_s: dict[
            str, float
        ] = {}  # vm -> when its agent was last heard; no mailbox an agent could fill
        self.backends: dict[str, ActorRef[Any]] = {}  # backend aggregate -> actor
        self.allocator: ActorRef[Any] | None = None
        self.host: ActorRef[Any] | None = None
        self.withheld: frozenset[str] = frozenset()  # addresses being cleared: not given away meanwhile
        self.observers: list[Callable[[Recorded], None]] = []
        self.begin: Callable[[VmState], None] = _no_supervisor  # starts the actor of a machine just requested

    def tell_vm(self, vm: str, message: Any) -> bool:
        """Tell the machine's actor; False when it has none here."""
        ref = self.vms.get(vm)
        return ref is not None and tell(ref, message)

    def tell_backend(self, slot: str, message: Any) -> bool:
        """Tell the scaler's actor; False when it has none here."""
        ref = self.backends.get(slot)
        return ref is not None and tell(ref, message)

    def foreign(self, fact: Recorded) -> None:
        """Tell whoever holds the fact's aggregate here of a fact that another process appended."""
        kind, _, rest = fact.aggregate.partition(".")
        if kind == "vm":
            if not self.tell_vm(rest, Observed(fact)):  # which tells the others once it has applied it
                self._elsewhere(rest, fact)
        elif kind in ("backend", "allocator"):
            self.publish((fact,), None)

    def _elsewhere(self, vm: str, fact: Recorded) -> None:
        """Follow a machine of another coordinator that holds a slot of a scaler we share."""
        if isinstance(fact.event, Requested) and fact.event.slot in self.backends:
            self.slots[vm] = fact.event.slot
        if vm in self.slots:
            self.publish((fact,), None)
            if isinstance(fact.event, Reaped):
                self.slots.pop(vm, None)

    def publish(self, facts: Iterable[Recorded], by: ActorRef[Any] | None) -> None:
        """Tell everybody whose state these facts change, except the actor that appended and applied them."""
        for fact in facts:
            kind, _, rest = fact.aggregate.partition(".")
            told: list[ActorRef[Any] | None] = []
            if kind == "vm":
                if concerned(fact.event):  # the others change no slot: a third of the work of such a fact
                    told = [self.backends.get(self.slots.get(rest, "")), self.allocator]
            elif kind == "allocator":
                told = [self.allocator]
            elif kind == "backend":
                told = [self.backends.get(fact.aggregate), self.allocator]
            for ref in told:
                if ref is not None and ref is not by:
                    tell(ref, Observed(fact))
            for observe in self.observers:
                observe(fact)


def _no_supervisor(state: VmState) -> None:
    raise AssertionError(f"{state.id} cannot begin: no supervisor has taken its place yet")


def tell(ref: ActorRef[Any], message: Any) -> bool:
    """Tell an actor that may have ended meanwhile; False when it had: its successor starts from the log."""
    try:
        ref.tell(message)
    except ActorDeadError:
        logger.debug("told an actor that has ended: %s", ref)
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything an actor may touch. One per coordinator process."""

    site: Site
    rules: dict[str, ScalerRules]  # by backend aggregate
    drivers: dict[str, Driver]  # by backend aggregate
    journal: Journal
    clock: Clock
    timers: Timers
    ids: Ids
    spawns: Effects
    teardowns: Effects
    reads: Effects
    access: dict[str, AgentAccess]  # by backend aggregate: machines of another network reach NATS elsewhere
    link: AgentLink
    crash: CrashPoints
    pool: ActorPool
    new_abort: Callable[[], Abort]
    link_up_since_s: Callable[[], float]
    """The monotonic second since when agents can be heard; infinity while they cannot."""
    pools: dict[str, AddressPool] = field(default_factory=dict)  # by allocator aggregate
    occupied: Callable[[str], frozenset[str]] = lambda _: frozenset()
    """Addresses of a network that something on the host uses which the log does not account for."""
    fatal: Callable[[str], None]
    """Ends the process in an orderly way: another one has taken our place, or we cannot keep a promise."""
    router: Router = field(default_factory=Router)
    in_flight: dict[str, InFlight] = field(default_factory=dict)

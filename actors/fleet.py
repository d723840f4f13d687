"""The fleet's front door: routes what is asked to the actor concerned, and waits for its answer with a deadline."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from hashlib import sha256
from typing import Any

import msgspec
from pykka import ActorRef

from actors.backend import Status
from actors.commands import (
    AgentDone,
    Answer,
    Demand,
    RegisterAgent,
    Registration,
    RemoveAgent,
    ReportProvision,
    ScalerStatus,
    SetGate,
)
from actors.decisions.capacity import Routed, ScalerRules, check_demand
from actors.decisions.labels import NoMatch, RoutableScaler, Route, match
from actors.decisions.provision import note_provision
from actors.decisions.resources import ResourceSpec, resolve
from actors.decisions.vm import NoteConfigAcked
from actors.errors import LogUnavailable, Refused
from actors.lending import waiting_thread
from actors.world import Call, World, tell
from events import subjects
from events.vm import Requested
from projections.vm import fold

ANSWER_S = 30.0
"""How long a front door waits for an actor; longer than a log that retries over a server restart."""


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration as far as routing uses it: replaced as a whole by a reload, never changed."""

    scalers: tuple[RoutableScaler, ...]
    rules: dict[str, ScalerRules]  # by scaler name
    resources: dict[str, tuple[ResourceSpec | None, ...]]  # by scaler name, one per label set
    defaults: ResourceSpec | None = None


class Fleet:
    """The `FrontDoor` of one coordinator. Holds no state of its own: routing is configuration, the rest is actors'."""

    def __init__(self, world: World, routing: Routing, *, answer_s: float = ANSWER_S) -> None:
        self._world = world
        self.routing = routing
        self._answer_s = answer_s
        self.refusals: list[Callable[[Answer], None]] = []  # told of every refusal, for metrics

    def demand(self, demand: Demand) -> tuple[Answer, ...]:
        """Admit or refuse each of the agents wanted.

        A demand with a job is known by the hash of the job's id: the same job asking twice is one demand.
        """
        try:
            answers = self._admit(demand)
        except Refused as refused:
            self._count((Answer(kind="refused", message=str(refused)),))
            raise
        self._count(answers)
        return answers

    def _admit(self, demand: Demand) -> tuple[Answer, ...]:
        check_demand(demand)
        routed = self.route(demand)
        if isinstance(routed, Answer):
            return (routed,) * demand.count
        allocator = self._world.router.allocator
        assert allocator is not None, "front doors open after the actors"
        answers: tuple[Answer, ...] = self._ask(
            allocator, Call(routed, cause=f"demand:{demand.id}", correlation=demand.id)
        )
        return answers

    def _count(self, answers: tuple[Answer, ...]) -> None:
        for answer in answers:
            if answer.kind not in ("spawning", "existing"):
                for told in self.refusals:
                    told(answer)

    def route(self, demand: Demand) -> Routed | Answer:
        """Return the demand with the label set that takes it, or the answer that none does."""
        found = match(self.routing.scalers, demand.labels, demand.exclude)
        if isinstance(found, NoMatch):
            return Answer(kind="no-backend", message=found.message)
        route: Route = found.route
        needs = resolve(
            ResourceSpec(requests=demand.requests, limits=demand.limits),
            self.routing.resources[route.scaler][route.index],
            self.routing.defaults,
        )
        if demand.job is not None:
            key = sha256(demand.job.encode()).hexdigest()[:32]
            demand = msgspec.structs.replace(demand, id=key)
        return Routed(
            demand=demand,
            rules=self.routing.rules[route.scaler],
            labels=route.labels,
            agent_labels=route.agent_labels,
            gate=route.gate,
            requests=needs.requests,
            limits=needs.limits,
        )

    def register(self, command: RegisterAgent) -> Registration | None:
        """Let the agent in, or refuse it; None when another coordinator has the duty.

        An id without an actor here is looked up in the log: reaped, foreign or never heard of are told apart.
        """
        ref = self._world.router.vms.get(command.vm)
        if ref is None:
            self._explain_absence(command.vm)
            return None
        answer: Registration = self._ask(ref, Call(command, cause=f"agent:{command.session}"))
        return answer

    def _explain_absence(self, vm: str) -> None:
        facts = self._world.journal.read(subjects.vm(vm))
        if not facts or not isinstance(facts[0].event, Requested):
            raise Refused(
                "unknown-agent", f"agent {vm} is unknown: no machine with this id was ever requested"
            )
        state = fold(facts)
        assert state is not None, "a life that was requested has a state"
        if not state.live:
            raise Refused("ended", f"agent {vm} is reaped ({state.reason}): its one life is over")
        if state.owner == self._world.site.coordinator:
            raise LogUnavailable(f"agent {vm} is being taken up again: ask again in a moment")

    def config_acked(self, vm: str, session: str) -> None:
        """Note that the agent has its configuration; unknown ids are ignored."""
        ref = self._world.router.vms.get(vm)
        if ref is not None:
            self._ask(ref, Call(NoteConfigAcked(session=session), cause=f"agent:{session}"))

    def beat(self, vm: str, session: str) -> bool:
        """Note that the agent lives; False unless this session is a live machine's registered agent here."""
        if self._world.router.sessions.get(vm) != session:
            return False
        self._world.router.heard_s[vm] = self._world.clock.monotonic_s()
        return True

    def done(self, command: AgentDone) -> None:
        """Note that the agent's job is over; a machine that is over already needs no note."""
        ref = self._world.router.vms.get(command.vm)
        if ref is None:
            try:
                self._explain_absence(command.vm)
            except Refused as refused:
                if refused.code != "ended":
                    raise
            return
        self._ask(ref, Call(command, cause=f"agent:{command.session}"))

    def remove(self, command: RemoveAgent) -> None:
        """Begin the end of a machine.

        Raises:
            Refused: unknown, reaped already, or busy and not forced.
        """
        ref = self._world.router.vms.get(command.vm)
        if ref is None:
            self._explain_absence(command.vm)
            raise Refused("elsewhere", f"agent {command.vm} belongs to another coordinator: ask that one")
        self._ask(ref, Call(command, cause=f"operator:{command.by}"))

    def provisioned(self, command: ReportProvision) -> bool:
        """Note what a provisioner says of one of its machines; False when another coordinator has the duty.

        Raises:
            Refused: the machine is unknown, or was never offered to this target.
        """
        ref = self._world.router.vms.get(command.vm)
        if ref is not None:
            self._ask(ref, Call(command, cause=f"provisioner:{command.target}"))
            return True
        state = fold(self._world.journal.read(subjects.vm(command.vm)))
        if state is None:
            raise Refused("unknown-agent", f"agent {command.vm} is unknown: it was never requested")
        note_provision(state, command)
        if state.live and state.owner == self._world.site.coordinator:
            raise LogUnavailable(f"agent {command.vm} is being taken up again: ask again in a moment")
        return not state.live

    def set_gate(self, command: SetGate) -> None:
        """Pause, resume or drain a scaler.

        Raises:
            Refused: there is no such scaler; names those there are.
        """
        self._ask(self._scaler(command.scaler), Call(command, cause=f"operator:{command.by}"))

    def scalers(self) -> tuple[ScalerStatus, ...]:
        """Return every scaler of this coordinator, in the order of the file."""
        return tuple(self._ask(self._scaler(name), Call(Status())) for name in self.routing.rules)

    def _scaler(self, name: str) -> ActorRef[Any]:
        rules = self.routing.rules.get(name)
        ref = None if rules is None else self._world.router.backends.get(rules.slot)
        if ref is None:
            there = ", ".join(self.routing.rules) or "none"
            raise Refused("unknown-scaler", f"no scaler {name!r} here; there are: {there}")
        return ref

    def log_tail(self, vm: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a machine of this host.

        Raises:
            Refused: the machine is unknown or another coordinator's.
        """
        facts = self._world.journal.read(subjects.vm(vm))
        if not facts or not isinstance(facts[0].event, Requested):
            raise Refused(
                "unknown-agent", f"agent {vm} is unknown: no machine with this id was ever requested"
            )
        requested: Requested = facts[0].event
        driver = self._world.drivers.get(requested.slot)
        if driver is None:
            raise Refused("elsewhere", f"agent {vm} belongs to coordinator {requested.owner}: ask that one")
        return driver.log_tail(vm, requested.placement, lines)

    def _ask(self, ref: ActorRef[Any], call: Call) -> Any:
        """Tell the actor and wait for its answer.

        Raises:
            TimeoutError: no answer in time; the command may still take effect, the log tells.
        """
        future: Future[Any] = Future()
        with waiting_thread():
            told = tell(ref, call._replace(reply=lambda result: _settle(future, result)))
        if not told:
            raise Refused("ended", "its actor has just ended: look at the log for how")
        try:
            return future.result(timeout=self._answer_s)
        except FutureTimeoutError:
            raise TimeoutError(
                f"no answer within {self._answer_s:g} s: is the log reachable? what was decided is in the log"
            ) from None


def _settle(future: Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)

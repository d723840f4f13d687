"""The coordinator's side of the agents' protocol: hears them, asks the front door, answers, commands, renews."""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

from actors.commands import AgentDone, FrontDoor, RegisterAgent, Registration
from actors.errors import Conflict, LogFull, LogUnavailable, Refused
from actors.ports import Clock
from events import subjects
from infra.agent.access import RenewedToken
from infra.agent.allowance import Allowance, Rate
from infra.agent.protocol import (
    VERBS,
    Accepted,
    Acked,
    Beat,
    Config,
    Declined,
    Done,
    FromAgent,
    FromCommand,
    FromCoordinator,
    Logs,
    Malformed,
    Noted,
    Register,
    Renew,
    Stop,
    Verb,
    encode,
    read_from_agent,
)
from infra.credentials import CredentialError
from infra.doors.connection import Connection, Message, Subscribed
from infra.doors.workers import Workers

_LOG = logging.getLogger("fleetlog.agent")
_RETRY_AFTER_S = 1.0
_RENEWALS_KEPT_MAX = 20_000

OnLines = Callable[[str, tuple[str, ...]], None]
"""Takes lines of a machine's agent; called from one thread; must be quick, and bounded itself."""


class Renewer(Protocol):
    """The part of agents' access that renews."""

    def due(self, ends_at: datetime) -> bool:
        """Tell whether a credential that ends then should be renewed now."""
        ...

    def renew(self, vm: str, public_key: str) -> RenewedToken:
        """Return a new token for the key."""
        ...


class AgentDoor:
    """Serves every agent of the cluster, from `start` to `close`; also the `AgentLink` by which actors stop agents.

    Beats and log lines are handled in the thread of their subscription, and whatever waits for the log (register,
    acked, done) in one of `threads` others: a slow log never makes an agent look silent. At most `waiting_max` wait;
    an agent that finds no room is told to ask again.
    """

    def __init__(
        self,
        connection: Connection,
        cluster: str,
        front_door: FrontDoor,
        access: Renewer,
        clock: Clock,
        *,
        on_lines: OnLines | None = None,
        rate: Rate | None = None,
        threads: int = 16,
        waiting_max: int = 4096,
        renew_again_after_s: float = 10.0,
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._front_door = front_door
        self._access = access
        self._clock = clock
        self._on_lines = on_lines
        self._allowance = Allowance(clock.monotonic_s, rate)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counts_mutex = threading.Lock()
        self._renew_again_after_s = renew_again_after_s
        self._renewed_at_s: OrderedDict[str, float] = OrderedDict()
        self._workers = Workers("agent-door", threads=threads, waiting_max=waiting_max)
        self._subscriptions: list[Subscribed] = []

    def start(self) -> None:
        """Begin to hear agents."""
        for verb in VERBS:
            subject = subjects.all_agents(self._cluster, verb)
            self._subscriptions.append(self._connection.subscribe(subject, self._hear(verb)))

    def close(self) -> None:
        """Hear no more; what is being answered gets a few seconds. Repeatable."""
        while self._subscriptions:
            self._subscriptions.pop().stop()
        self._workers.stop()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how many messages there were by (verb, outcome); both are from small fixed sets."""
        with self._counts_mutex:
            return dict(self._counts)

    def stop(self, vm: str, reason: str, grace_s: float) -> None:
        """Tell the agent to end its job and leave within `grace_s` seconds."""
        self._command(vm, Stop(reason=reason[:1024], grace_s=max(0.0, grace_s)))

    def _hear(self, verb: Verb) -> Callable[[Message], None]:
        def heard(message: Message) -> None:
            vm = message.subject.split(".")[3]
            if not subjects.VM_ID.fullmatch(vm):
                self._count(verb, "malformed")
                return
            if verb in ("beat", "logs"):
                self._take(verb, vm, message)
            elif not self._workers.offer(lambda: self._take(verb, vm, message)):
                self._count(verb, "overloaded")
                self._answer(
                    vm,
                    message.reply,
                    Declined(
                        code="overloaded",
                        message="too many agents speak at once: ask again",
                        retry_after_s=_RETRY_AFTER_S,
                    ),
                )

        return heard

    def _take(self, verb: Verb, vm: str, message: Message) -> None:
        try:
            said = read_from_agent(verb, message.payload)
        except Malformed as error:
            self._count(verb, error.code)
            self._answer(vm, message.reply, Declined(code=error.code, message=f"agent {vm}: {error}"))
            return
        answer = self._handle(vm, said)
        self._count(verb, _outcome(answer))
        if answer is None:
            return
        self._answer(vm, message.reply, answer[0])
        if (registration := answer[1]) is not None:
            self._command(vm, _config(registration))
            assert isinstance(said, Register)
            self._renew_if_due(vm, said)

    def _handle(self, vm: str, said: FromAgent) -> tuple[FromCoordinator, Registration | None] | None:
        """Ask the front door; None: no answer is due."""
        try:
            match said:
                case Register():
                    return self._register(vm, said)
                case Acked():
                    self._front_door.config_acked(vm, said.session)
                case Beat():
                    if self._front_door.beat(vm, said.session):
                        self._renew_if_due(vm, said)
                    return None
                case Logs():
                    self._lines(vm, said)
                    return None
                case Done():
                    self._front_door.done(
                        AgentDone(vm=vm, session=said.session, exit_code=said.exit_code, detail=said.detail)
                    )
        except Refused as error:
            return Declined(code=error.code, message=str(error)), None
        except (Conflict, LogUnavailable, LogFull, TimeoutError) as error:
            # Not the agent's fault and perhaps over soon: it asks again, and repeating does no harm.
            code = _PASSING[type(error)]
            return Declined(code=code, message=str(error) or code, retry_after_s=_RETRY_AFTER_S), None
        return Noted(), None

    def _register(self, vm: str, said: Register) -> tuple[FromCoordinator, Registration | None] | None:
        registration = self._front_door.register(
            RegisterAgent(
                vm=vm, session=said.session, agent_version=said.agent_version, facts=dict(said.facts)
            )
        )
        if registration is None:
            return None
        return Accepted(vm=vm, beat_every_s=registration.beat_every_s), registration

    def _lines(self, vm: str, said: Logs) -> None:
        # Lines are a sign of life as well, and only a live agent's are worth keeping.
        if not self._front_door.beat(vm, said.session) or self._on_lines is None:
            return
        lines, lost = self._allowance.admit(vm, said.lines, said.dropped)
        if len(lines) < len(said.lines):
            self._count("logs", "over-rate")
        if lost:
            lines = (f"[fleetlog: {lost} lines are missing here, more came than are carried]", *lines)
        if lines:
            self._on_lines(vm, lines)

    def _renew_if_due(self, vm: str, said: Register | Beat) -> None:
        if said.public_key is None or said.credential_ends_at is None:
            return  # a credential that does not end, or an agent that does not want another
        if not self._access.due(datetime.fromtimestamp(said.credential_ends_at, UTC)):
            return
        with self._counts_mutex:
            now_s = self._clock.monotonic_s()
            last_s = self._renewed_at_s.get(vm)
            # A beat may be on its way while the new token is; and nobody makes us sign without end.
            if last_s is not None and now_s - last_s < self._renew_again_after_s:
                return
            self._renewed_at_s[vm] = now_s
            self._renewed_at_s.move_to_end(vm)
            if len(self._renewed_at_s) > _RENEWALS_KEPT_MAX:
                self._renewed_at_s.popitem(last=False)
        try:
            renewed = self._access.renew(vm, said.public_key)
        except (Refused, CredentialError) as error:
            self._count("renew", "refused")
            _LOG.warning("the credential of agent %s is not renewed: %s", vm, error)
            return
        self._count("renew", "sent")
        self._command(vm, Renew(jwt=renewed.jwt))

    def _command(self, vm: str, command: FromCommand) -> None:
        self._publish(subjects.agent_command(self._cluster, vm), encode(command))

    def _answer(self, vm: str, reply: str, answer: FromCoordinator) -> None:
        # The sender chose the reply subject, and we may publish on all of them: answered elsewhere than in the
        # agent's own inbox, it would speak through us, to the log or to the server's own interface.
        inbox = f"{subjects.agent_inbox(vm)}."
        if reply.startswith(inbox):
            self._publish(reply, encode(answer))
        elif reply:
            self._count("reply", "foreign-inbox")

    def _publish(self, subject: str, payload: bytes) -> None:
        # What is lost while there is no server is asked for again by the agent, or found by its beats.
        try:
            self._connection.publish(subject, payload)
        except LogUnavailable:
            self._count("publish", "lost")

    def _count(self, verb: str, outcome: str) -> None:
        with self._counts_mutex:
            self._counts[verb, outcome] += 1


_PASSING: Mapping[type[Exception], str] = {
    Conflict: "conflict",
    LogUnavailable: "log-unavailable",
    LogFull: "log-full",
    TimeoutError: "timeout",
}


def _outcome(answer: tuple[FromCoordinator, Registration | None] | None) -> str:
    if answer is None:
        return "heard"
    match answer[0]:
        case Declined(retry_after_s=None):
            return "refused"
        case Declined():
            return "not-now"
        case Accepted():
            return "accepted"
        case Noted():
            return "noted"


def _config(registration: Registration) -> Config:
    return Config(
        labels=registration.labels,
        gate=registration.gate,
        job=registration.job,
        run=registration.run,
        beat_every_s=registration.beat_every_s,
    )

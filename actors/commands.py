"""What can be asked, in the imperative, and what is answered. Times and ids come in with the command."""

from typing import Literal, Protocol

import msgspec

from events.envelope import Resources
from projections.backend import Gate


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants agents. `id` names this request; with `job` a second demand for it is the same demand."""

    id: str
    labels: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    count: int = 1
    job: str | None = None
    run: str | None = None
    requests: Resources = Resources()
    limits: Resources = Resources()
    by: str = ""


AnswerKind = Literal[
    "spawning",  # a machine is on its way; `vm` names it
    "existing",  # this job's earlier demand got this machine, and it lives
    "at-capacity",  # a cap is reached; the message names it, the need and what is free
    "no-backend",  # no scaler has these labels; the message names the labels there are
    "refused",  # paused, draining, malformed, log full: the message says why
    "skipped",  # the scaler backs off after failures; try again after `retry_after_s`
]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer for one of the `count` agents wanted."""

    kind: AnswerKind
    message: str = ""
    vm: str | None = None
    scaler: str | None = None
    backend: str | None = None
    cap: str | None = None  # which cap refused: scaler-agents, global-agents, scaler-cpus, ...
    retry_after_s: float | None = None


class RegisterAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent says that it is the one of machine `vm`. `session` is random, made at the agent's start."""

    vm: str
    session: str
    agent_version: str = ""
    facts: dict[str, str] = {}


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is in: what it may run, for which job it was started, how often it must beat."""

    vm: str
    labels: tuple[str, ...]
    gate: tuple[str, ...]
    job: str | None
    run: str | None
    beat_every_s: float


class AgentDone(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's job is over; it takes no other. `exit_code` is the job command's."""

    vm: str
    session: str
    exit_code: int | None
    detail: str = ""


class RemoveAgent(msgspec.Struct, frozen=True, kw_only=True):
    """End this machine by name. `force`: also when its agent is busy."""

    vm: str
    by: str
    force: bool = False


Verdict = Literal[
    "accepted",  # a machine is on its way; the provisioner answers for it from now on
    "failed",  # there will be none; the reason is in the detail
    "terminated",  # nothing of it is left, if there ever was anything
]


class ReportProvision(msgspec.Struct, frozen=True, kw_only=True):
    """A target's provisioner says what became of a machine. `permanent`: trying again would fail as well."""

    vm: str
    target: str
    verdict: Verdict
    reference: str = ""
    detail: str = ""
    permanent: bool = False


class RedeemClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A machine shows its claim code, as the sha256 of it in hex, and the public nkey its credential is to be for."""

    digest: str
    public_key: str


class Redeemed(msgspec.Struct, frozen=True, kw_only=True):
    """The code is spent, for this key; a credential may be minted now."""

    vm: str
    labels: tuple[str, ...]
    nats_url: str


class SetGate(msgspec.Struct, frozen=True, kw_only=True):
    """Pause, resume or drain a scaler."""

    scaler: str
    gate: Gate
    by: str


class ScalerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler as its coordinator sees it now."""

    name: str
    backend: str
    gate: Gate
    max_agents: int
    taken: int
    starting: int
    waiting: int  # admitted, in the throttle
    registered: int
    failures: int
    labels: tuple[tuple[str, ...], ...]
    last_failure: str = ""


class FrontDoor(Protocol):
    """What the API, the agents' door and the command line ask of a coordinator. Blocking, each with a deadline.

    Every method may raise `Refused`, `Conflict`, `LogUnavailable` and, past its deadline, TimeoutError.
    """

    def demand(self, demand: Demand) -> tuple[Answer, ...]:
        """Admit or refuse each of the agents wanted; answered as soon as the log has the decision."""
        ...

    def register(self, command: RegisterAgent) -> Registration | None:
        """Let the agent in, or refuse it. None: another coordinator has the duty and will answer."""
        ...

    def config_acked(self, vm: str, session: str) -> None:
        """Note that the agent has its configuration."""
        ...

    def beat(self, vm: str, session: str) -> bool:
        """Note that the agent lives. Cheap, writes nothing; unknown ids are ignored.

        Returns whether this session is the registered agent of a live machine that this coordinator has the
        duty for: only such a one has its credential renewed and its log lines taken.
        """
        ...

    def done(self, command: AgentDone) -> None:
        """Note that the agent's job is over. Repeatable."""
        ...

    def remove(self, command: RemoveAgent) -> None:
        """Begin the end of a machine."""
        ...

    def set_gate(self, command: SetGate) -> None:
        """Pause, resume or drain a scaler."""
        ...

    def scalers(self) -> tuple[ScalerStatus, ...]:
        """Return every scaler of this coordinator."""
        ...

    def log_tail(self, vm: str, lines: int) -> tuple[str, ...]:
        """Return the last lines of a machine of this host."""
        ...


class Provisioning(Protocol):
    """What provisioners' answers are told to."""

    def provisioned(self, command: ReportProvision) -> bool:
        """Note what a provisioner says. Repeatable. False: another coordinator has the duty and will answer.

        Raises:
            Refused: the machine is unknown, or not one of this target's.
            Conflict, LogUnavailable, TimeoutError: as in every `FrontDoor`.
        """
        ...


class Claims(Protocol):
    """What machines show their claim codes to."""

    def redeem(self, command: RedeemClaim) -> Redeemed:
        """Spend a claim code, once for all coordinators; the same key may ask again for what it was given.

        Raises:
            Refused: `invalid-claim`, `claim-consumed`, `claim-expired`, or `ended`: the machine's life is over.
            Conflict, LogUnavailable: as in every `FrontDoor`.
        """
        ...

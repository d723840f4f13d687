"""The asking side of the API: blocking calls with a deadline each, for the command line and for programs."""

from typing import Protocol, TypeVar

import msgspec
from nats.errors import TimeoutError as NatsTimeout

from actors.commands import ScalerStatus
from actors.decisions.labels import Explanation
from events import subjects
from infra.api.host_messages import (
    LiveAnswer,
    LiveRequest,
    StopAnswer,
    StopRequest,
    SweepAnswer,
    SweepRequest,
)
from infra.api.messages import (
    DemandAnswer,
    DemandRequest,
    DoneAnswer,
    ErrorAnswer,
    GateRequest,
    HostAnswer,
    HostRequest,
    LogsAnswer,
    LogsRequest,
    Malformed,
    MatchAnswer,
    MatchRequest,
    RemoveRequest,
    ScalersAnswer,
    ScalersRequest,
    StatusAnswer,
    StatusRequest,
    read_answer,
)
from infra.api.request import Request
from infra.journal.connection import NobodyAnswers

ANSWER_S = 40.0
"""A little longer than a coordinator takes at most, so that its own reason arrives before our patience ends."""

_LONGER_S = 5.0
"""How much longer we wait than the coordinator was told to."""

AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class Requests(Protocol):
    """What the client needs of a NATS connection."""

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask and return the answer; NobodyAnswers, LogUnavailable."""
        ...


class ApiRefused(Exception):  # noqa: N818 - the coordinator's answer
    """A coordinator answered no. `code` is stable; the message says why and what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoCoordinator(Exception):  # noqa: N818 - a state of the cluster
    """Nobody serves the request: no coordinator runs, or not this one."""


class ApiClient:
    """Asks coordinators of one cluster over a connection that somebody else owns.

    Every call may raise ApiRefused, NoCoordinator, LogUnavailable (no NATS) and TimeoutError: past its deadline
    the request may still take effect, which the log tells.
    """

    def __init__(self, connection: Requests, cluster: str) -> None:
        self._connection = connection
        self._cluster = cluster

    def demand(self, request: DemandRequest, *, timeout_s: float = ANSWER_S) -> DemandAnswer:
        """Ask any coordinator for agents."""
        subject = subjects.api(self._cluster, "demand")
        absent = f"no coordinator of cluster {self._cluster} runs"
        return self._ask(subject, "demand", request, DemandAnswer, absent=absent, timeout_s=timeout_s)

    def demand_of(
        self, coordinator: str, request: DemandRequest, *, timeout_s: float = ANSWER_S
    ) -> DemandAnswer:
        """Ask this coordinator for agents."""
        return self._ask_one(coordinator, "demand", request, DemandAnswer, timeout_s)

    def remove(self, coordinator: str, request: RemoveRequest, *, timeout_s: float = ANSWER_S) -> None:
        """Begin the end of a machine."""
        self._ask_one(coordinator, "agent.rm", request, DoneAnswer, timeout_s)

    def logs(self, coordinator: str, request: LogsRequest, *, timeout_s: float = ANSWER_S) -> LogsAnswer:
        """Return the last lines of a machine."""
        return self._ask_one(coordinator, "agent.logs", request, LogsAnswer, timeout_s)

    def scalers(self, coordinator: str, *, timeout_s: float = ANSWER_S) -> tuple[ScalerStatus, ...]:
        """Return a coordinator's scalers as they are now."""
        return self._ask_one(coordinator, "scaler.list", ScalersRequest(), ScalersAnswer, timeout_s).scalers

    def set_gate(self, coordinator: str, request: GateRequest, *, timeout_s: float = ANSWER_S) -> None:
        """Pause, drain or open a scaler."""
        self._ask_one(coordinator, "scaler.gate", request, DoneAnswer, timeout_s)

    def match(
        self, coordinator: str, request: MatchRequest, *, timeout_s: float = ANSWER_S
    ) -> tuple[Explanation, ...]:
        """Return which label set would take such a job, and why the others would not."""
        return self._ask_one(coordinator, "scaler.match", request, MatchAnswer, timeout_s).explanations

    def verify_host(self, coordinator: str, *, timeout_s: float = ANSWER_S) -> HostAnswer:
        """Let a coordinator compare its host with the log."""
        return self._ask_one(coordinator, "host.verify", HostRequest(), HostAnswer, timeout_s)

    def live_machines(self, coordinator: str, *, timeout_s: float = ANSWER_S) -> LiveAnswer:
        """Return the machines that run on a coordinator's host."""
        return self._ask_one(coordinator, "host.live", LiveRequest(), LiveAnswer, timeout_s)

    def stop_machines(self, coordinator: str, request: StopRequest) -> StopAnswer:
        """End machines that nobody accounts for."""
        return self._ask_one(coordinator, "host.stop", request, StopAnswer, request.timeout_s + _LONGER_S)

    def sweep(self, coordinator: str, request: SweepRequest) -> SweepAnswer:
        """Take away what is dead and nobody's on a coordinator's host."""
        return self._ask_one(coordinator, "host.sweep", request, SweepAnswer, request.timeout_s + _LONGER_S)

    def status(self, coordinator: str, *, timeout_s: float = 2.0) -> StatusAnswer:
        """Return how a coordinator is."""
        return self._ask_one(coordinator, "status", StatusRequest(), StatusAnswer, timeout_s)

    def _ask_one(
        self, coordinator: str, verb: str, request: Request, kind: type[AnswerT], timeout_s: float
    ) -> AnswerT:
        subject = subjects.api_of(self._cluster, coordinator, verb)
        absent = f"coordinator {coordinator} does not run"
        return self._ask(subject, verb, request, kind, absent=absent, timeout_s=timeout_s)

    def _ask(
        self,
        subject: str,
        verb: str,
        request: Request,
        kind: type[AnswerT],
        *,
        absent: str,
        timeout_s: float,
    ) -> AnswerT:
        try:
            payload = self._connection.request(subject, msgspec.json.encode(request), timeout_s)
        except NobodyAnswers as error:
            if isinstance(error.__cause__, NatsTimeout):
                raise TimeoutError(
                    f"no answer to {verb} within {timeout_s:g} s; it may still take effect, the log tells"
                ) from error
            raise NoCoordinator(f"{absent}; start one with `fleetlog up`") from error
        try:
            answer = read_answer(verb, payload)
        except Malformed as error:
            raise ApiRefused(
                "answer-malformed", f"{error}; use the same fleetlog version on both sides"
            ) from error
        if isinstance(answer, ErrorAnswer):
            raise ApiRefused(answer.error.code, answer.error.message)
        assert isinstance(answer, kind)
        return answer

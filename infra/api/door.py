"""The coordinator's side of the API: reads a request, asks the front door, answers; every trouble is an answer."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from actors.commands import Demand, FrontDoor, RemoveAgent, SetGate
from actors.decisions.labels import Explanation
from actors.decisions.reclaim import LiveMachine
from actors.errors import DriverError, LogUnavailable, Refused
from actors.ports import Ids
from actors.sweep import Report, Stopped
from events import subjects
from infra.api.answering import answer_to, outcome, overloaded
from infra.api.host_messages import (
    LiveAnswer,
    LiveRequest,
    StopAnswer,
    StopRequest,
    SweepAnswer,
    SweepRequest,
    sweep_findings,
)
from infra.api.messages import (
    VERBS,
    WAITING_S_MAX,
    DemandAnswer,
    DemandRequest,
    DoneAnswer,
    GateRequest,
    HostAnswer,
    HostDifference,
    HostRequest,
    LogsAnswer,
    LogsRequest,
    MatchAnswer,
    MatchRequest,
    RemoveRequest,
    ScalersAnswer,
    ScalersRequest,
    StatusAnswer,
    StatusRequest,
    read_request,
)
from infra.api.request import Request
from infra.doors.connection import Connection, Message, Subscribed
from infra.doors.workers import Workers

_LOG = logging.getLogger("fleetlog.api")
QUEUE = "fleetlog"
"""The queue group of coordinators that share requests which any of them may answer."""
LOGS_BYTES_MAX = 256 * 1024
_LINE_OVERHEAD_BYTES = 8


class Care(Protocol):
    """The host's actor, asked from outside."""

    def live(self, timeout_s: float | None = None) -> tuple[LiveMachine, ...]:
        """Return the machines that run on the host."""
        ...

    def stop(self, vm: str, by: str, timeout_s: float | None = None) -> Stopped:
        """End a machine that nobody accounts for."""
        ...

    def sweep(self, why: str, *, dry_run: bool = False, timeout_s: float | None = None) -> Report:
        """Take away what is dead and nobody's."""
        ...


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a coordinator can be asked beyond its front door; what is None is answered as unsupported.

    `status` is called in the subscription's own thread, so that a busy coordinator still says that it is there.
    """

    status: Callable[[], StatusAnswer]
    explain: Callable[[tuple[str, ...], tuple[str, ...]], tuple[Explanation, ...]] | None = None
    verify_host: Callable[[], tuple[HostDifference, ...]] | None = None
    care: Care | None = None
    host: str = ""


class ApiDoor:
    """Serves one coordinator's requests from `start` to `close`.

    At most `threads` are carried out at once and `waiting_max` wait; whoever finds no room, or waited too long,
    is told to ask again. A request is never begun after its sender must have given up.
    """

    def __init__(
        self,
        connection: Connection,
        cluster: str,
        coordinator_id: str,
        front_door: FrontDoor,
        *,
        ids: Ids,
        knowledge: Knowledge,
        threads: int = 8,
        waiting_max: int = 1024,
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._coordinator = coordinator_id
        self._front_door = front_door
        self._ids = ids
        self._knowledge = knowledge
        self._workers = Workers("api", threads=threads, waiting_max=waiting_max)
        self._subscriptions: list[Subscribed] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counts_mutex = threading.Lock()

    def start(self) -> None:
        """Begin to serve."""
        shared = subjects.api(self._cluster, "demand")
        self._subscriptions.append(self._connection.subscribe(shared, self._hear("demand"), queue=QUEUE))
        for verb in VERBS:
            subject = subjects.api_of(self._cluster, self._coordinator, verb)
            self._subscriptions.append(self._connection.subscribe(subject, self._hear(verb)))

    def close(self) -> None:
        """Serve no more; what is being carried out gets a few seconds. Repeatable."""
        while self._subscriptions:
            self._subscriptions.pop().stop()
        self._workers.stop()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how many requests there were by (verb, outcome): `ok` or an error's code."""
        with self._counts_mutex:
            return dict(self._counts)

    def _hear(self, verb: str) -> Callable[[Message], None]:
        def heard(message: Message) -> None:
            came_s = time.monotonic()
            if verb == "status":
                self._serve(verb, message, came_s)
            elif not self._workers.offer(lambda: self._serve(verb, message, came_s)):
                self._answer(verb, message.reply, overloaded())

        return heard

    def _serve(self, verb: str, message: Message, came_s: float) -> None:
        if time.monotonic() - came_s > WAITING_S_MAX:
            self._answer(verb, message.reply, overloaded())
            return
        self._answer(verb, message.reply, self._outcome(verb, message.payload))

    def _outcome(self, verb: str, payload: bytes) -> msgspec.Struct:
        return answer_to(verb, self._coordinator, lambda: self._carry_out(read_request(verb, payload)))

    def _carry_out(self, request: Request) -> msgspec.Struct:
        match request:
            case DemandRequest():
                return self._demand(request)
            case RemoveRequest(agent=agent, force=force, by=by):
                self._front_door.remove(RemoveAgent(vm=agent, by=by or "api", force=force))
                return DoneAnswer(coordinator=self._coordinator)
            case LogsRequest(agent=agent, lines=lines):
                return _fitting(self._front_door.log_tail(agent, lines))
            case ScalersRequest():
                return ScalersAnswer(scalers=self._front_door.scalers(), coordinator=self._coordinator)
            case GateRequest(scaler=scaler, gate=gate, by=by):
                self._front_door.set_gate(SetGate(scaler=scaler, gate=gate, by=by or "api"))
                return DoneAnswer(coordinator=self._coordinator)
            case MatchRequest(labels=labels, exclude=exclude):
                explain = self._knowledge.explain
                if explain is None:
                    raise self._unsupported("explain routing")
                return MatchAnswer(explanations=explain(labels, exclude), coordinator=self._coordinator)
            case HostRequest():
                verify = self._knowledge.verify_host
                if verify is None:
                    raise self._unsupported("look at its host")
                return HostAnswer(
                    differences=verify(), host=self._knowledge.host, coordinator=self._coordinator
                )
            case LiveRequest() | StopRequest() | SweepRequest():
                return self._of_host(request)
            case StatusRequest():
                return self._knowledge.status()
            case _:
                raise AssertionError(f"no verb has {type(request).__name__}")

    def _of_host(self, request: LiveRequest | StopRequest | SweepRequest) -> msgspec.Struct:
        care, host = self._knowledge.care, self._knowledge.host
        if care is None:
            raise self._unsupported("reclaim anything on its host")
        match request:
            case LiveRequest():
                return LiveAnswer(machines=care.live(), host=host, coordinator=self._coordinator)
            case StopRequest():
                return StopAnswer(results=_stop_each(care, request), coordinator=self._coordinator)
            case SweepRequest(dry_run=dry_run, timeout_s=timeout_s):
                report = care.sweep("asked for", dry_run=dry_run, timeout_s=timeout_s)
                return SweepAnswer(
                    findings=sweep_findings(report),
                    unlisted=report.unlisted,
                    host=host,
                    coordinator=self._coordinator,
                )

    def _demand(self, request: DemandRequest) -> DemandAnswer:
        demand = Demand(
            id=request.id or self._ids.random(),
            labels=request.labels,
            exclude=request.exclude,
            count=request.count,
            job=request.job,
            run=request.run,
            requests=request.requests.resources(),
            limits=request.limits.resources(),
            by=request.by,
        )
        return DemandAnswer(
            demand=demand.id, answers=self._front_door.demand(demand), coordinator=self._coordinator
        )

    def _unsupported(self, what: str) -> Refused:
        return Refused("unsupported", f"coordinator {self._coordinator} cannot {what}")

    def _answer(self, verb: str, reply: str, answer: msgspec.Struct) -> None:
        with self._counts_mutex:
            self._counts[verb, outcome(answer)] += 1
        if not reply:
            return
        try:
            self._connection.publish(reply, msgspec.json.encode(answer))
        except LogUnavailable as lost:
            _LOG.warning("an answer to %s was lost: %s; what was decided is in the log", verb, lost)


def _stop_each(care: Care, request: StopRequest) -> tuple[Stopped, ...]:
    """Stop one after the other; the time is for all of them."""
    deadline_s = time.monotonic() + request.timeout_s
    results: list[Stopped] = []
    for vm in dict.fromkeys(request.vms):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            detail = f"not reached within {request.timeout_s:g} s: ask again"
            results.append(Stopped(vm=vm, outcome="error", detail=detail))
            continue
        try:
            results.append(care.stop(vm, request.by or "api", timeout_s=left_s))
        except (TimeoutError, Refused, DriverError) as error:
            results.append(Stopped(vm=vm, outcome="error", detail=str(error)))
    return tuple(results)


def _fitting(lines: tuple[str, ...]) -> LogsAnswer:
    """Return the newest lines that fit into one message."""
    room = LOGS_BYTES_MAX
    kept = 0
    for line in reversed(lines):
        # Each character may take six bytes in JSON when it is escaped; what counts is the form that travels.
        room -= len(msgspec.json.encode(line)) + _LINE_OVERHEAD_BYTES
        if room < 0:
            break
        kept += 1
    return LogsAnswer(lines=lines[len(lines) - kept :], cut=len(lines) - kept)

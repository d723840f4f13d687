"""The requests a coordinator serves and their answers: JSON, one object each, versioned, with limits and a schema.

`fleetlog.<cluster>.api.demand` goes to any coordinator; `fleetlog.<cluster>.api.<coordinator>.<verb>` to that one.
Every request may have `version`, which is 1 when it is left out. Whatever goes wrong is answered as
`{"error": {"code", "message"}}`; an answer without `error` is the verb's own.
"""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from actors.commands import Answer, ScalerStatus
from actors.decisions.labels import Explanation
from events.envelope import Resources
from infra.api.host_messages import (
    LiveAnswer,
    LiveRequest,
    StopAnswer,
    StopRequest,
    SweepAnswer,
    SweepRequest,
)
from infra.api.request import FORMS, Cpus, DemandId, Id, Labels, MemoryBytes, Request, ScalerName, Text, VmId

VERSION = 1
REQUEST_BYTES_MAX = 64 * 1024
WAITING_S_MAX = 30.0
"""A request that waited longer than this for its turn is not begun: whoever sent it has given up."""


class Needs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU cores and bytes of memory; zero means undeclared."""

    cpus: Cpus = 0.0
    memory_bytes: MemoryBytes = 0

    def resources(self) -> Resources:
        """Return them as commands have them."""
        return Resources(cpus=self.cpus, memory_bytes=self.memory_bytes)


class DemandRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`demand`: somebody wants `count` agents whose jobs ask for `labels`.

    With `job`, a second demand for the same job is the same demand, and answered `existing` while its agent
    lives: the safe way to ask again. `id` names the demand in the log; left out, one is made.
    """

    labels: Labels = ()
    exclude: Labels = ()
    count: Annotated[int, Meta(ge=1, le=100)] = 1
    job: Id | None = None
    run: Id | None = None
    requests: Needs = Needs()
    limits: Needs = Needs()
    by: Text = ""
    id: DemandId | None = None


class RemoveRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`agent.rm`: end this machine. `force`: also when its agent is busy."""

    agent: VmId
    force: bool = False
    by: Text = ""


class LogsRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`agent.logs`: the last lines a machine wrote."""

    agent: VmId
    lines: Annotated[int, Meta(ge=1, le=10_000)] = 100


class ScalersRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`scaler.list`: every scaler of the coordinator as it is now."""


class GateRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`scaler.gate`: `paused` takes no new agents, `draining` also ends idle ones, `open` takes agents again."""

    scaler: ScalerName
    gate: Literal["open", "paused", "draining"]
    by: Text = ""


class MatchRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`scaler.match`: which label set would take such a job, and why the others would not. Takes nothing."""

    labels: Labels = ()
    exclude: Labels = ()


class HostRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host.verify`: compare what the log says of the coordinator's host with what is there. Changes nothing."""


class StatusRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`status`: the coordinator is there, and this is how it is."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable and for machines, `message` one sentence with the way out."""

    code: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The request was refused or could not be carried out."""

    error: ErrorBody
    version: Literal[1] = 1


class DemandAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer for each agent wanted (one for all of them when the job had one already)."""

    demand: str
    answers: tuple[Answer, ...]
    coordinator: str = ""
    version: Literal[1] = 1


class DoneAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """It is done, and in the log."""

    done: Literal[True] = True
    coordinator: str = ""
    version: Literal[1] = 1


class LogsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Lines as the machine wrote them, oldest first: not to be trusted on a terminal. `cut`: older ones left out."""

    lines: tuple[str, ...]
    cut: int = 0
    version: Literal[1] = 1


class ScalersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """In the order of the coordinator's file."""

    scalers: tuple[ScalerStatus, ...]
    coordinator: str = ""
    version: Literal[1] = 1


class MatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict for every label set, in the file's order."""

    explanations: tuple[Explanation, ...]
    coordinator: str = ""
    version: Literal[1] = 1


class HostDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing on the host that is not as the log says."""

    kind: str
    where: str
    key: str
    detail: str


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Empty `differences`: the host is as the log says."""

    differences: tuple[HostDifference, ...]
    host: str = ""
    coordinator: str = ""
    version: Literal[1] = 1


class SweepTally(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's sweeps of its host came to since its start; all but the first two as of the last one."""

    sweeps: int = 0
    reaped: int = 0
    spared: int = 0
    failed: int = 0
    unlisted: int = 0


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One read model's projector as its coordinator sees it; `stage` `parked` needs a person."""

    view: str
    stage: str
    sequence: int = 0
    head: int = 0
    lag_s: float = 0.0
    reason: str = ""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server the coordinator runs itself. `durability` says what an acknowledged write survives."""

    name: str
    running: bool
    restarts: int = 0
    trouble: str | None = None
    durability: str = ""


class Unaccounted(msgspec.Struct, frozen=True, kw_only=True):
    """Something on the host with our mark that nobody answers for."""

    kind: str
    name: str
    detail: str = ""


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a coordinator is. `now` is its wall clock; fields it does not know of keep their defaults."""

    coordinator: str
    now: datetime
    host: str = ""
    pid: int = 0
    release: str = ""
    started_at: datetime | None = None
    config_digest: str = ""
    views: tuple[ViewStatus, ...] = ()
    servers: tuple[ServerStatus, ...] = ()
    unaccounted: tuple[Unaccounted, ...] = ()
    notes: tuple[str, ...] = ()
    sweeps: SweepTally = SweepTally()
    version: Literal[1] = 1


VERBS: dict[str, tuple[type[Request], type[msgspec.Struct]]] = {
    "demand": (DemandRequest, DemandAnswer),
    "agent.rm": (RemoveRequest, DoneAnswer),
    "agent.logs": (LogsRequest, LogsAnswer),
    "scaler.list": (ScalersRequest, ScalersAnswer),
    "scaler.gate": (GateRequest, DoneAnswer),
    "scaler.match": (MatchRequest, MatchAnswer),
    "host.verify": (HostRequest, HostAnswer),
    "host.live": (LiveRequest, LiveAnswer),
    "host.stop": (StopRequest, StopAnswer),
    "host.sweep": (SweepRequest, SweepAnswer),
    "status": (StatusRequest, StatusAnswer),
}
"""Verb -> what is asked and what is answered. `demand` may also be sent to whoever is free."""


_Asked = TypeVar("_Asked", bound=Request)


class Malformed(Exception):  # noqa: N818 - a state of the request
    """These bytes are no request of this verb: the message names the field and what it accepts."""


def read_request(verb: str, payload: bytes) -> Request:
    """Return the request in `payload`; an empty payload is a request with nothing but defaults.

    Raises:
        Malformed: as `read_strictly`.
    """
    return read_strictly(verb, payload, VERBS[verb][0])


def read_strictly(verb: str, payload: bytes, kind: type[_Asked]) -> _Asked:
    """Return the request of this kind in `payload`.

    Raises:
        Malformed: too large, not JSON, a field that is unknown, missing or out of its bounds, another version.
    """
    if len(payload) > REQUEST_BYTES_MAX:
        raise Malformed(f"the request has {len(payload)} bytes: at most {REQUEST_BYTES_MAX} are accepted")
    try:
        return msgspec.json.decode(payload or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise Malformed(f"{verb}: {_named(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{verb}: the request is not JSON: {error}") from error


_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<field>[^`]*)`$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<field>[^`]+)`")


def _named(complaint: str) -> str:
    """Put the field first and its form in words: `field labels[0]: expected ...`."""
    for pattern, form in FORMS.items():
        complaint = complaint.replace(f"`str` matching regex {pattern!r}", form)
    if found := _AT.match(complaint):
        what, field = found["what"], found["field"]
        if inner := _FIELD.search(what):
            field = f"{field}.{inner['field']}" if field else inner["field"]
        if field == "version":
            return f"field version: this coordinator speaks version {VERSION}"
        return f"field {field or 'of the request'}: {what[:1].lower()}{what[1:]}"
    if found := _FIELD.search(complaint):
        return f"field {found['field']}: {complaint[:1].lower()}{complaint[1:]}"
    return f"{complaint[:1].lower()}{complaint[1:]}"


def read_answer(verb: str, payload: bytes) -> msgspec.Struct | ErrorAnswer:
    """Return what was answered; fields of a newer version are ignored.

    Raises:
        Malformed: it is neither an answer of this verb nor an error.
    """
    try:
        loose: Any = msgspec.json.decode(payload)
        kind = ErrorAnswer if isinstance(loose, dict) and "error" in loose else VERBS[verb][1]
        answer: msgspec.Struct | ErrorAnswer = msgspec.convert(loose, kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the answer to {verb} is not of this version: {error}") from error
    return answer


def failure(code: str, message: str) -> ErrorAnswer:
    """Return the answer that says no."""
    return ErrorAnswer(error=ErrorBody(code=code, message=message))


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of every request and answer, and which belongs to which verb."""
    kinds = [*(kind for pair in VERBS.values() for kind in pair), ErrorAnswer]
    references, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    named = dict(zip(kinds, references, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "version": VERSION,
        "verbs": {
            verb: {
                "request": named[request],
                "answer": {"anyOf": [named[answer], named[ErrorAnswer]]},
            }
            for verb, (request, answer) in VERBS.items()
        },
        "$defs": definitions,
    }

"""The words that an agent and a coordinator exchange over NATS: every message, its bounds, and its JSON Schema.

Every payload is one JSON object of at most `BYTES_MAX[verb]` bytes. `protocol` is 1; a field that a reader does not
know is ignored, so fields may be added, and a new meaning is a new protocol number. Subjects are spelled in
`events/subjects.py`:

| who publishes | subject           | message                        | answer on the agent's inbox            |
|---------------|-------------------|--------------------------------|----------------------------------------|
| agent         | `agent.<id>.register` | `Register`                 | `Accepted`, `Declined`, or none: ask again |
| agent         | `agent.<id>.acked`    | `Acked`                    | `Noted` or `Declined`                  |
| agent         | `agent.<id>.beat`     | `Beat`                     | none                                   |
| agent         | `agent.<id>.logs`     | `Logs`                     | none                                   |
| agent         | `agent.<id>.done`     | `Done`                     | `Noted` or `Declined`                  |
| coordinator   | `command.<id>`        | `Config`, `Stop`, `Renew`  | `Config` is answered by `Acked`        |

All of it is core NATS: a message may be lost, and may come twice. So whatever matters is asked for until it is
answered, and everything may be repeated: registering again with the same session is the same registration, and brings
the configuration again. Who an agent is, is proven by the subject it was able to publish on, never by the payload.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from events import subjects

PROTOCOL = 1
LINE_CHARACTERS_MAX = 8192
LINES_MAX = 500
FACTS_MAX = 32

Verb = Literal["register", "acked", "beat", "logs", "done"]
VERBS: tuple[Verb, ...] = ("register", "acked", "beat", "logs", "done")
"""What an agent can say; the last token of its subject."""

BYTES_MAX: Mapping[Verb, int] = {
    "register": 32 * 1024,
    "acked": 1024,
    "beat": 1024,
    "logs": 256 * 1024,
    "done": 16 * 1024,
}
COMMAND_BYTES_MAX = 64 * 1024

Session = Annotated[
    str,
    Meta(pattern="^[0-9a-f]{32}$", description="128 random bits in hex, made once at the agent's start"),
]
PublicKey = Annotated[
    str, Meta(pattern="^U[A-Z2-7]{55}$", description="the public nkey the agent connects with")
]
UnixSeconds = Annotated[int, Meta(ge=0, le=2**40, description="seconds since 1970, UTC")]


class AgentMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What every message of an agent has."""

    session: Session
    protocol: int = PROTOCOL


class Register(AgentMessage, frozen=True, kw_only=True):
    """I am the agent of the machine whose subject this came on. Sent before anything else, until answered.

    `public_key` and `credential_ends_at` (the `exp` of the token in use) let any coordinator renew the credential
    without having kept anything about it.
    """

    agent_version: Annotated[str, Meta(max_length=64)] = ""
    facts: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=256)]],
        Meta(max_length=FACTS_MAX, description="self-reported: os, arch, host name"),
    ] = {}
    public_key: PublicKey | None = None
    credential_ends_at: UnixSeconds | None = None


class Acked(AgentMessage, frozen=True, kw_only=True):
    """I have my configuration. Asked until noted."""


class Beat(AgentMessage, frozen=True, kw_only=True):
    """I live. Sent every `beat_every_s` of the last `Accepted` or `Config`, from registration until done is noted."""

    public_key: PublicKey | None = None
    credential_ends_at: UnixSeconds | None = None


class Logs(AgentMessage, frozen=True, kw_only=True):
    """Lines that the job wrote, in order. `dropped` lines before them were lost because there were too many."""

    lines: Annotated[
        tuple[Annotated[str, Meta(max_length=LINE_CHARACTERS_MAX)], ...], Meta(max_length=LINES_MAX)
    ] = ()
    dropped: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Done(AgentMessage, frozen=True, kw_only=True):
    """My job is over and I take no other. Asked until noted.

    `exit_code` is the command's; below zero: it was ended by that signal; null: it never began, `detail` says why.
    """

    exit_code: Annotated[int, Meta(ge=-128, le=255)] | None = None
    detail: Annotated[str, Meta(max_length=2048)] = ""


FromAgent = Register | Acked | Beat | Logs | Done


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer"):
    """What every answer has."""

    protocol: int = PROTOCOL


class Accepted(Answer, frozen=True, kw_only=True, tag="accepted"):
    """You are in. The configuration follows as a command; if it does not, register again."""

    vm: str
    beat_every_s: Annotated[float, Meta(gt=0)]


class Noted(Answer, frozen=True, kw_only=True, tag="noted"):
    """It is in the log; no need to say it again."""


class Declined(Answer, frozen=True, kw_only=True, tag="declined"):
    """No. `code` is stable and for machines, `message` says what to do next.

    `retry_after_s` null: it is final. A number: not now (the log does not answer, too many at once); ask again then.
    """

    code: str
    message: str
    retry_after_s: float | None = None


FromCoordinator = Accepted | Noted | Declined


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """What every command has."""

    protocol: int = PROTOCOL


class Config(Command, frozen=True, kw_only=True, tag="config"):
    """What you may run and for whom you were started. Every label in `gate` must be asked for by a job you take."""

    labels: tuple[str, ...] = ()
    gate: tuple[str, ...] = ()
    job: str | None = None
    run: str | None = None
    beat_every_s: Annotated[float, Meta(gt=0)]


class Stop(Command, frozen=True, kw_only=True, tag="stop"):
    """End the job and leave: asked politely at once, killed after `grace_s` seconds."""

    reason: str
    grace_s: Annotated[float, Meta(ge=0)]


class Renew(Command, frozen=True, kw_only=True, tag="renew"):
    """A new token for the key you have; connect with it before the server cuts the old one's connection."""

    jwt: str


FromCommand = Config | Stop | Renew


class Malformed(Exception):  # noqa: N818 - a state of the message, not an accident
    """A payload is too large, no JSON, or not of the message's form. `code` is `malformed` or `unsupported-protocol`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


_FROM_AGENT: Mapping[Verb, type[FromAgent]] = {
    "register": Register,
    "acked": Acked,
    "beat": Beat,
    "logs": Logs,
    "done": Done,
}
_AGENT_DECODERS = {verb: msgspec.json.Decoder(form) for verb, form in _FROM_AGENT.items()}
_ANSWERS: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)
_COMMANDS: msgspec.json.Decoder[FromCommand] = msgspec.json.Decoder(FromCommand)
_ENCODER = msgspec.json.Encoder()
_T = TypeVar("_T")


class _ProtocolOnly(msgspec.Struct):
    protocol: int = PROTOCOL


_PROTOCOL_ONLY = msgspec.json.Decoder(_ProtocolOnly)


def encode(message: FromAgent | FromCoordinator | FromCommand) -> bytes:
    """Return the message as JSON."""
    return _ENCODER.encode(message)


def read_from_agent(verb: Verb, payload: bytes) -> FromAgent:
    """Return what an agent said.

    Raises:
        Malformed: it is none of ours; the message may be sent to the agent.
    """
    if len(payload) > BYTES_MAX[verb]:
        raise Malformed(
            "malformed",
            f"{verb} has {len(payload)} bytes, at most {BYTES_MAX[verb]} are taken: send less at once",
        )
    _check_protocol(payload)
    try:
        return _AGENT_DECODERS[verb].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed("malformed", f"{verb}: {error}; `fleetlog contract` shows its form") from error


def read_answer(payload: bytes) -> FromCoordinator:
    """Return a coordinator's answer; raises Malformed."""
    return _read(_ANSWERS, payload, "answer")


def read_command(payload: bytes) -> FromCommand:
    """Return a coordinator's command; raises Malformed."""
    return _read(_COMMANDS, payload, "command")


def _read(decoder: msgspec.json.Decoder[_T], payload: bytes, what: str) -> _T:
    if len(payload) > COMMAND_BYTES_MAX:
        raise Malformed(
            "malformed", f"{what} has {len(payload)} bytes, at most {COMMAND_BYTES_MAX} are taken"
        )
    _check_protocol(payload)
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed("malformed", f"{what}: {error}") from error


def _check_protocol(payload: bytes) -> None:
    # Asked first: a message of a later protocol may have any form, and its sender deserves the true reason.
    try:
        spoken = _PROTOCOL_ONLY.decode(payload).protocol
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed("malformed", f"not a JSON object with an integer `protocol`: {error}") from error
    if spoken != PROTOCOL:
        raise Malformed(
            "unsupported-protocol",
            f"protocol {spoken} is spoken there and {PROTOCOL} here: run the same release on both sides",
        )


def contract() -> dict[str, Any]:
    """Return the protocol for other people's agents: who says what to whom, and the JSON Schema of each message."""
    forms: list[Any] = [*_FROM_AGENT.values(), Accepted, Noted, Declined, Config, Stop, Renew]
    template = "#/definitions/{name}"
    _, definitions = msgspec.json.schema_components(forms, ref_template=template)

    def reference(*forms: type[msgspec.Struct]) -> dict[str, Any]:
        found = [{"$ref": template.format(name=form.__name__)} for form in forms]
        return found[0] if len(found) == 1 else {"oneOf": found}

    answers: Mapping[Verb, dict[str, Any] | None] = {
        "register": reference(Accepted, Declined),
        "acked": reference(Noted, Declined),
        "beat": None,
        "logs": None,
        "done": reference(Noted, Declined),
    }
    return {
        "protocol": PROTOCOL,
        "agent_publishes": {
            verb: {
                "subject": subjects.agent("<cluster>", "<id>", verb),
                "bytes_max": BYTES_MAX[verb],
                "payload": reference(form),
                "answer": answers[verb],
            }
            for verb, form in _FROM_AGENT.items()
        },
        "agent_hears": {
            "subject": subjects.agent_command("<cluster>", "<id>"),
            "bytes_max": COMMAND_BYTES_MAX,
            "payload": reference(Config, Stop, Renew),
        },
        "agent_inbox_prefix": subjects.agent_inbox("<id>"),
        "definitions": definitions,
    }

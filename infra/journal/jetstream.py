"""JetStream's API as blocking calls over a wire, and the error numbers that mean something to us."""

import base64
from typing import Any

import msgspec

from infra.journal.wire import Wire

WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_IN_FLIGHT = 10164
"""Also without another writer: a replicated stream takes one guarded write per subject at a time."""
DUPLICATE = 10201
"""Of an atomic batch; a plain publish says it in its acknowledgement."""
DUPLICATE_IN_PROCESS = 10158
NOT_SERVED = 503
STORE_FAILED = 10077
"""The description says why; `maximum bytes exceeded` is the stream's own limit."""
NO_ROOM = frozenset({10023, 10047})
"""The server's own resources are spent."""
NO_MESSAGE = 10037
STREAM_NOT_FOUND = 10059
NAME_IN_USE = 10058
CONSUMER_NOT_FOUND = 10014


class ApiError(Exception):
    """JetStream said no."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code
        self.description = description


class Stored(msgspec.Struct, frozen=True):
    """A stored message as read back."""

    sequence: int
    subject: str
    payload: bytes


def answer_of(payload: bytes) -> dict[str, Any]:
    """Decode an answer.

    Raises:
        ApiError: it is an error.
    """
    answer: dict[str, Any] = msgspec.json.decode(payload)
    if error := answer.get("error"):
        raise ApiError(error.get("err_code", error.get("code", 0)), error.get("description", ""))
    return answer


def call(wire: Wire, subject: str, body: object, timeout_s: float) -> dict[str, Any]:
    """Ask the API (`subject` without its `$JS.API.`) and return the answer.

    Raises:
        ApiError: JetStream said no.
        WireLost, LogUnavailable, ConnectionRefusedByServer: see `Wire.request`.
    """
    payload = b"" if body is None else msgspec.json.encode(body)
    return answer_of(wire.request(f"$JS.API.{subject}", payload, timeout_s))


def stored(wire: Wire, stream: str, which: dict[str, Any], timeout_s: float) -> Stored | None:
    """Read one message back from the stream's leader (a direct get may be stale); None when there is none."""
    try:
        answer = call(wire, f"STREAM.MSG.GET.{stream}", which, timeout_s)
    except ApiError as error:
        if error.code == NO_MESSAGE:
            return None
        raise
    message = answer["message"]
    return Stored(message["seq"], message["subject"], base64.b64decode(message.get("data", "")))

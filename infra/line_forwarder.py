"""Turn one line an agent wrote into one line of our log: JSON, with whose it is."""

from __future__ import annotations

from typing import Any

import msgspec


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line came from; what is not known is left out of the line."""

    service: str
    agent: str
    run: str | None = None
    request: str | None = None
    job: str | None = None
    source: str | None = None


def forwarded(line: str, origin: Origin) -> str:
    """Return the line as one JSON object on one line.

    A line that is a JSON object keeps its fields, also where they are named like ours; only `agent` is always ours,
    because an agent must not speak as another. Everything else becomes the message of an object with level info.
    """
    fields = _parsed(line)
    if fields is None:
        fields = {"level": "info", "message": line}
    known = {name: value for name, value in msgspec.structs.asdict(origin).items() if value is not None}
    return msgspec.json.encode({**known, **fields, "agent": origin.agent}).decode()


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the JSON object the line is, None when it is none: an array, a bare value, no JSON."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

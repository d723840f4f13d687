"""The stream that is the log: made, compared with what the log needs, checked for losses, resized."""

import os
from typing import Any

import msgspec

from events import subjects
from infra.journal.jetstream import NAME_IN_USE, STREAM_NOT_FOUND, ApiError, call
from infra.journal.wire import Wire
from projections.vm import BrokenLog

FACT_BYTES_MAX = 256 * 1024
"""A fact with its headers; the server refuses larger ones."""

DEFAULT_LIMIT_BYTES = 4 << 30
"""About ten million facts."""

_DEDUPLICATED_S = 300
_NEEDED: dict[str, Any] = {
    "storage": "file",
    "retention": "limits",
    "discard": "new",  # a full log refuses facts and never drops history
    "max_age": 0,
    "max_msgs": -1,
    "max_msgs_per_subject": -1,
    "max_consumers": -1,
    "max_msg_size": FACT_BYTES_MAX,
    "duplicate_window": _DEDUPLICATED_S * 10**9,
    "deny_delete": True,
    "deny_purge": True,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
    "allow_direct": True,
    "allow_atomic": True,
}
_NEVER = ("sealed", "mirror", "sources", "no_ack", "republish", "subject_transform", "allow_msg_counter")
"""Settings that must be absent or false."""


class LogRefused(Exception):  # noqa: N818 - a state of the server
    """The stream cannot be the log as it is: foreign settings, or the server will not make it. Says the way out."""


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log ends and how full it is."""

    last_sequence: int
    facts: int
    used_bytes: int
    limit_bytes: int


def open_stream(
    wire: Wire, cluster: str, *, limit_bytes: int, replicas: int, timeout_s: float = 5.0
) -> StreamState:
    """Make the stream unless it is there, and prove that it is fit to be the log.

    `limit_bytes` and `replicas` are for making it only: afterwards `resize` and the operator rule.

    Raises:
        LogRefused: it has foreign settings, each of which is named, or cannot be made.
        BrokenLog: facts are missing.
    """
    name = subjects.stream(cluster)
    try:
        answer = call(wire, f"STREAM.INFO.{name}", None, timeout_s)
    except ApiError as error:
        if error.code != STREAM_NOT_FOUND:
            raise LogRefused(f"stream {name} at {wire.address} cannot be read: {error}") from error
        answer = _create(wire, cluster, limit_bytes=limit_bytes, replicas=replicas, timeout_s=timeout_s)
    _compare(answer["config"], wire, cluster)
    state = _state(answer)
    check_whole(answer["state"], name)
    return state


def stream_state(wire: Wire, cluster: str, timeout_s: float = 5.0) -> StreamState:
    """Return where the log ends.

    Raises:
        LogRefused: there is no such stream any more.
    """
    name = subjects.stream(cluster)
    try:
        return _state(call(wire, f"STREAM.INFO.{name}", None, timeout_s))
    except ApiError as error:
        raise LogRefused(f"stream {name} at {wire.address}: {error}; restore it, or start anew") from error


def resize(wire: Wire, cluster: str, limit_bytes: int, timeout_s: float = 5.0) -> StreamState:
    """Set another limit; at once in force.

    Raises:
        LogRefused: what is stored would not fit (nothing is ever dropped), or the server has no room for it.
    """
    name = subjects.stream(cluster)
    try:
        answer = call(wire, f"STREAM.INFO.{name}", None, timeout_s)
        used = answer["state"]["bytes"]
        if limit_bytes < used:
            raise LogRefused(
                f"the log has {used} bytes and nothing is dropped: give at least that, not {limit_bytes}"
            )
        config = answer["config"] | {"max_bytes": limit_bytes}
        return _state(call(wire, f"STREAM.UPDATE.{name}", config, timeout_s))
    except ApiError as error:
        raise LogRefused(
            f"stream {name} at {wire.address} stays as it is: {error}; free disk there, or raise max_file_store"
        ) from error


def check_whole(state: dict[str, Any], name: str) -> None:
    """Prove by the server's own count that no fact is missing.

    Raises:
        BrokenLog: the first ones, some in the middle, or blocks the server lost.
    """
    last, messages, first = state["last_seq"], state["messages"], state["first_seq"]
    if messages != last or (messages and first != 1) or state.get("num_deleted") or state.get("lost"):
        raise BrokenLog(
            f"stream {name} has {messages} facts from {first} to {last}, so some are missing; "
            "restore the server's store from a backup, its history is not complete"
        )


def _create(wire: Wire, cluster: str, *, limit_bytes: int, replicas: int, timeout_s: float) -> dict[str, Any]:
    name = subjects.stream(cluster)
    config = _NEEDED | {
        "name": name,
        "subjects": [subjects.whole_log(cluster)],
        "max_bytes": limit_bytes,
        "num_replicas": replicas,
        "description": "every fact of a fleetlog cluster; never edit",
    }
    try:
        answer = call(wire, f"STREAM.CREATE.{name}", config, timeout_s)
    except ApiError as error:
        if error.code == NAME_IN_USE:  # another coordinator was faster
            return call(wire, f"STREAM.INFO.{name}", None, timeout_s)
        raise LogRefused(
            f"stream {name} cannot be made at {wire.address}: {error}; give the server's JetStream the room of "
            f"{limit_bytes} bytes, remove what stands in the way, or choose another cluster name"
        ) from error
    os.sync()  # the server does not sync a new stream's own files: a power cut would take all of it
    return answer


def foreign_settings(config: dict[str, Any], cluster: str) -> list[str]:
    """Return what is not as the log needs it, each with what it is and what it must be."""
    needed = _NEEDED | {"subjects": [subjects.whole_log(cluster)]}
    wrong = [
        f"{key} is {config.get(key)!r}, not {value!r}"
        for key, value in needed.items()
        if config.get(key) != value
    ]
    wrong += [f"{key} is {config[key]!r}, not unset" for key in _NEVER if config.get(key)]
    if config.get("persist_mode") not in (None, "", "default"):
        wrong.append(f"persist_mode is {config['persist_mode']!r}, not 'default'")
    if config["max_bytes"] <= 0:
        wrong.append(f"max_bytes is {config['max_bytes']}, and there has to be a limit")
    return wrong


def _compare(config: dict[str, Any], wire: Wire, cluster: str) -> None:
    wrong = foreign_settings(config, cluster)
    if "allow_atomic" not in config:
        wrong.append(f"the server is {wire.info.get('version')}, and atomic batches need 2.12 or later")
    if wrong:
        raise LogRefused(
            f"stream {config['name']} at {wire.address} has foreign settings: {'; '.join(wrong)}. Set them right "
            "with `nats stream edit`, or choose another cluster name"
        )


def _state(answer: dict[str, Any]) -> StreamState:
    state = answer["state"]
    return StreamState(
        last_sequence=state["last_seq"],
        facts=state["messages"],
        used_bytes=state["bytes"],
        limit_bytes=answer["config"]["max_bytes"],
    )


def durable_consumers(wire: Wire, cluster: str, timeout_s: float = 5.0) -> dict[str, int]:
    """Return the log's durable consumers by name, with how many messages each was delivered again.

    Raises:
        LogUnavailable, LogRefused: no answer, or we may not ask.
    """
    name = subjects.stream(cluster)
    try:
        answer = call(wire, f"CONSUMER.LIST.{name}", {"offset": 0}, timeout_s)
    except ApiError as error:
        raise LogRefused(f"consumers of stream {name} cannot be listed: {error}") from error
    durable = (each for each in answer.get("consumers") or () if each["config"].get("durable_name"))
    return {each["name"]: int(each.get("num_redelivered", 0)) for each in durable}

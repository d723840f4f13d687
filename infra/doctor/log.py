"""NATS and the log on it: reachable, set up as the log needs it, whole, with room, and at the same time of day."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import msgspec

from actors.errors import LogUnavailable
from actors.ports import Clock
from events import subjects
from infra.doctor.check import Check, fail, good, warn
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.headroom import demand_limit
from infra.journal.jetstream import STREAM_NOT_FOUND, ApiError, call
from infra.journal.stream import check_whole, foreign_settings
from infra.journal.wire import Wire, WireLost
from projections.vm import BrokenLog

SERVER_LEAST = (2, 12)
"""Atomic batches, on which decisions over several aggregates rest, came with this NATS."""
SKEW_WARN_S = 2.0
SKEW_FAIL_S = 30.0
_NEARLY_FULL = 0.8
_PENDING_WARN_FACTS = 10_000
_ANSWER_S = 5.0


def check_log(connect: Callable[[], Wire], cluster: str, clock: Clock) -> Iterator[Check]:
    """Yield the checks; after one that makes the others impossible they end."""
    try:
        with connect() as wire:
            yield _server(wire)
            yield from _stream(wire, cluster, clock)
    except ConnectionRefusedByServer as error:
        yield fail(
            "nats",
            str(error),
            "give credentials that this NATS accepts with --nats-creds, or its CA with --tls-ca",
        )
    except (LogUnavailable, WireLost) as error:
        yield fail("nats", str(error), "start NATS (`fleetlog up` brings its own), or name it with --nats")


def _server(wire: Wire) -> Check:
    version = str(wire.info.get("version", "?"))
    where = f"{wire.address}, version {version}"
    numbers = tuple(
        int(part) for part in version.split("-", maxsplit=1)[0].split(".")[:2] if part.isdecimal()
    )
    if numbers < SERVER_LEAST:
        return fail("nats", where, "use NATS 2.12 or later: older ones have no atomic batches")
    return good("nats", where)


def _stream(wire: Wire, cluster: str, clock: Clock) -> Iterator[Check]:
    name = subjects.stream(cluster)
    asked_at = clock.now()
    try:
        answer = call(wire, f"STREAM.INFO.{name}", None, _ANSWER_S)
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            yield fail(
                "log",
                f"there is no stream {name}",
                "start a coordinator of this cluster, or give the right --cluster",
            )
        else:
            yield fail("log", f"stream {name} cannot be read: {error}", "look at the server's log")
        return
    answered_at = clock.now()
    yield _settings(answer["config"], cluster)
    yield _integrity(answer["state"], name)
    yield _room(answer["config"], answer["state"])
    yield _replicas(answer)
    yield _consumers(wire, name)
    if (check := _skew(answer, asked_at, answered_at)) is not None:
        yield check


def _settings(config: dict[str, Any], cluster: str) -> Check:
    wrong = foreign_settings(config, cluster)
    if wrong:
        return fail(
            "log settings", "; ".join(wrong), "set them right with `nats stream edit`: history is not safe"
        )
    return good("log settings", "as the log needs them: nothing is deleted, a full log refuses")


def _integrity(state: dict[str, Any], name: str) -> Check:
    try:
        check_whole(state, name)
    except BrokenLog as error:
        return fail("log integrity", str(error), "restore the server's store from a backup")
    count = state["messages"]
    return good("log integrity", f"{count} facts, none missing" if count else "empty")


def _room(config: dict[str, Any], state: dict[str, Any]) -> Check:
    used, limit = state["bytes"], config["max_bytes"]
    if limit <= 0:
        return fail("log room", "no limit", "`fleetlog log resize 4g`")
    share = used / limit
    detail = f"{share:.1%} of {limit / 2**20:.0f} MiB used"
    if used >= demand_limit(limit, 0):
        return fail("log room", f"{detail}: new demand is refused", "`fleetlog log resize` raises the limit")
    if share >= _NEARLY_FULL:
        return warn("log room", detail, "`fleetlog log resize` raises the limit")
    return good("log room", detail)


def _replicas(answer: dict[str, Any]) -> Check:
    cluster = answer.get("cluster") or {}
    wanted = answer["config"].get("num_replicas", 1)
    late = [each.get("name", "?") for each in cluster.get("replicas") or () if not each.get("current")]
    if late:
        return warn("log replicas", f"{wanted}, not level: {', '.join(late)}", "look at those servers")
    return good("log replicas", str(wanted))


def _consumers(wire: Wire, name: str) -> Check:
    """Look at the durable ones: who reads scale-ups and scale-downs, and whether they keep up."""
    try:
        answer = call(wire, f"CONSUMER.LIST.{name}", {"offset": 0}, _ANSWER_S)
    except ApiError as error:
        return warn("log consumers", f"cannot be listed: {error}", "give the user that right")
    durable = [each for each in answer.get("consumers") or () if each["config"].get("durable_name")]
    late = [
        f"{each['name']} has {each['num_pending']} to read"
        for each in durable
        if each["num_pending"] > _PENDING_WARN_FACTS
    ]
    if late:
        return warn("log consumers", "; ".join(late), "do these readers run?")
    return good("log consumers", f"{len(durable)} durable of {answer['total']}, all keep up")


def _skew(answer: dict[str, Any], asked_at: datetime, answered_at: datetime) -> Check | None:
    """Compare our wall clock with the server's, which read it between our question and its answer."""
    try:
        theirs = msgspec.convert(answer.get("ts"), datetime)
    except msgspec.ValidationError:
        return None
    ahead = max(timedelta(0), asked_at - theirs, theirs - answered_at)
    skew_s = ahead.total_seconds()
    detail = f"{skew_s:.3f} s from the NATS server's"
    todo = "let NTP set both clocks: facts bear the writer's time, and credentials have an end"
    if skew_s >= SKEW_FAIL_S:
        return fail("clock", detail, todo)
    if skew_s >= SKEW_WARN_S:
        return warn("clock", detail, todo)
    return good(
        "clock",
        f"within {max(skew_s, 0.001):.3f} s of the NATS server's"
        if skew_s
        else "agrees with the NATS server's",
    )

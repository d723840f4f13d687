"""What `/health` says: whether the coordinator does its work, and for each problem what to do about it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from actors.ports import Headroom
from infra.embedded.server_process import Status
from infra.metrics.lag import ViewLag
from projections.failures import ScalerFailures


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, and what to do about it."""

    what: str
    do: str


class LogHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The log as last heard; None where it has not answered lately."""

    last_sequence: int | None = None
    used_bytes: int | None = None
    demand_limit_bytes: int | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator now. `warnings` need a look and leave the status ok; `leader` is None while there is none."""

    status: Literal["ok", "degraded"]
    coordinator: str
    version: str
    connected: bool
    log: LogHealth
    views: tuple[ViewLag, ...] = ()
    leader: str | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def assess(
    *,
    coordinator: str,
    version: str,
    connected: bool,
    headroom: Headroom | None,
    views: Sequence[ViewLag] | None,
    servers: Mapping[str, Status],
    failures: Mapping[str, ScalerFailures],
    lacks: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Health:
    """Return the health, from what is known now; asks nobody.

    Degraded: this coordinator cannot do its work (no connection, a log that takes no demand, a server that is
    down), or something never heals by itself (a parked view). A view that waits, a scaler whose agents fail, and
    one that `lacks` something on its host, are warnings. None stands for what did not answer lately.
    """
    problems = [*_log_problems(connected=connected, headroom=headroom), *_server_problems(servers)]
    warnings = [*_failure_warnings(failures), *_lack_warnings(lacks)]
    for view in views or ():
        if view.stage == "parked":
            where = "" if view.parked_at is None else f" at sequence {view.parked_at}"
            problems.append(
                Problem(
                    what=f"view {view.view} is parked{where}: {view.reason}",
                    do="see `fleetlog doctor`; when the cause is gone, `fleetlog rebuild` makes the view from the log",
                )
            )
        elif view.stage == "waiting":
            warnings.append(
                Problem(
                    what=f"view {view.view} waits, {view.lag_facts} facts behind: {view.reason}",
                    do="bring the database back; the view catches up by itself",
                )
            )
    return Health(
        status="degraded" if problems else "ok",
        coordinator=coordinator,
        version=version,
        connected=connected,
        log=LogHealth()
        if headroom is None
        else LogHealth(
            last_sequence=headroom.last_sequence,
            used_bytes=headroom.used_bytes,
            demand_limit_bytes=headroom.demand_limit_bytes,
        ),
        views=tuple(views or ()),
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def undetermined(error: BaseException) -> Health:
    """Return the health of a coordinator whose own check failed, which is no reason to call it well."""
    return Health(
        status="degraded",
        coordinator="",
        version="",
        connected=False,
        log=LogHealth(),
        problems=(
            Problem(
                what=f"the health check itself failed: {type(error).__name__}",
                do="see the coordinator's log for the whole error; it is a bug worth reporting",
            ),
        ),
    )


def _log_problems(*, connected: bool, headroom: Headroom | None) -> list[Problem]:
    if not connected:
        return [
            Problem(
                what="not connected to NATS: nothing can be decided, running agents go on",
                do="check that the server runs and is reachable; the connection comes back by itself",
            )
        ]
    if headroom is None:
        return [
            Problem(
                what="the log has not answered lately",
                do="check the NATS server's JetStream and its disk; see `fleetlog doctor`",
            )
        ]
    if headroom.used_bytes >= headroom.demand_limit_bytes:
        return [
            Problem(
                what=f"the log refuses demand: {headroom.used_bytes} bytes used, the limit for demand is "
                f"{headroom.demand_limit_bytes} of {headroom.limit_bytes}",
                do="raise the limit with `fleetlog log resize`, or make room with `fleetlog log archive`",
            )
        ]
    return []


def _server_problems(servers: Mapping[str, Status]) -> list[Problem]:
    return [
        Problem(
            what=f"the embedded {name} server does not run: {status.trouble or 'it is being started'}",
            do="it is started again by itself; when it stays down, see its log in the data directory",
        )
        for name, status in servers.items()
        if not status.running
    ]


def _failure_warnings(failures: Mapping[str, ScalerFailures]) -> list[Problem]:
    # Without the details: they may quote a command line, and this page asks for no credential.
    return [
        Problem(
            what=f"scaler {name}: {each.bound + each.unbound} agents failed lately, {each.bound} with a job waiting",
            do=f"`fleetlog scaler describe {name}` has the last error",
        )
        for name, each in failures.items()
    ]


def _lack_warnings(lacks: Mapping[str, Sequence[str]]) -> list[Problem]:
    return [
        Problem(
            what=f"scaler {name} is degraded and starts no machines: {'; '.join(why)}",
            do="put that right; the network is looked at again at the next start, everything else at the next spawn",
        )
        for name, why in lacks.items()
    ]

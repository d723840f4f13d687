"""The coordinators: whether they answer, and what they say of their servers, read models and host."""

from collections.abc import Callable, Iterable, Iterator

from actors.errors import LogUnavailable
from infra.api.client import ApiRefused, NoCoordinator
from infra.api.messages import ServerStatus, StatusAnswer, ViewStatus
from infra.doctor.check import Check, fail, good, warn

_LAG_WARN_FACTS = 1000
_NAMED_MOST = 5
_SYNCED = "every acknowledged write is synced"


def check_coordinators(ids: Iterable[str], ask: Callable[[str], StatusAnswer]) -> Iterator[Check]:
    """Yield the checks of every coordinator that the log has as running."""
    ids = tuple(ids)
    if not ids:
        yield fail(
            "coordinator", "none runs", "start one with `fleetlog up`: nobody brings agents up or down"
        )
    synced: bool | None = None
    for each in ids:
        try:
            status = ask(each)
        except (NoCoordinator, TimeoutError, LogUnavailable) as error:
            yield fail(
                f"coordinator {each}",
                f"the log has it as running, and it does not answer: {error}",
                "start it again with `fleetlog up`: it takes up its machines",
            )
            continue
        except ApiRefused as error:
            yield fail(f"coordinator {each}", str(error), "look at its log")
            continue
        yield good(f"coordinator {each}", f"answers; host {status.host or '?'}, pid {status.pid or '?'}")
        yield from (warn(f"coordinator {each}", note, "") for note in status.notes)
        for server in status.servers:
            yield _server(each, server)
            if server.name == "nats":
                synced = server.durability.startswith(_SYNCED)
                yield _durability(server)
        yield from (_view(view) for view in status.views)
        yield _unaccounted(status)
        yield _sweeps(status)
    if synced is None:
        yield warn(
            "durability",
            "this NATS is not fleetlog's own, and how it syncs cannot be seen from here",
            "set `sync_interval: always` in its JetStream settings: by default a power cut loses acknowledged facts",
        )


def _server(coordinator: str, server: ServerStatus) -> Check:
    name = f"embedded {server.name}"
    if not server.running:
        return fail(
            name, f"does not run: {server.trouble or 'no reason known'}", f"look at the log of {coordinator}"
        )
    if server.restarts:
        trouble = f", last: {server.trouble}" if server.trouble else ""
        return warn(
            name, f"restarted {server.restarts} times{trouble}", "look at its log in the data directory"
        )
    return good(name, "runs, never restarted")


def _durability(server: ServerStatus) -> Check:
    if server.durability.startswith(_SYNCED):
        return good("durability", server.durability)
    return warn("durability", server.durability or "unknown", "start with `--durability always`")


def _view(view: ViewStatus) -> Check:
    name = f"view {view.view}"
    behind = max(0, view.head - view.sequence)
    detail = f"{view.stage} at {view.sequence}, {behind} facts behind"
    if view.stage == "parked":
        return fail(name, f"{detail}: {view.reason}", "fix what it names, then `fleetlog rebuild`")
    if view.stage == "waiting":
        return warn(name, f"{detail}: {view.reason}", "it goes on by itself when PostgreSQL and NATS answer")
    if behind > _LAG_WARN_FACTS:
        return warn(name, f"{detail}, {view.lag_s:.0f} s", "it catches up; if not, look at PostgreSQL")
    return good(name, detail)


def _unaccounted(status: StatusAnswer) -> Check:
    name = f"host {status.host or status.coordinator}"
    if not status.unaccounted:
        return good(name, "nothing on it with our mark that nobody answers for")
    named = [f"{each.kind} {each.name}" for each in status.unaccounted[:_NAMED_MOST]]
    more = len(status.unaccounted) - len(named)
    shown = ", ".join(named) + (f" and {more} more" if more else "")
    return warn(
        name,
        f"{len(status.unaccounted)} things with our mark that nobody answers for: {shown}",
        "`fleetlog orphans` lists what of it runs, and --stop ends it; what is dead goes with the next sweep",
    )


def _sweeps(status: StatusAnswer) -> Check:
    name, found = f"sweeps of {status.host or status.coordinator}", status.sweeps
    detail = f"{found.sweeps} so far: {found.reaped} things taken away, {found.spared} spared by the last one"
    todo = "see the coordinator's log for why; it is tried again by the next one, or now with `fleetlog reap`"
    if found.sweeps == 0:
        return warn(name, "none came through yet", todo)
    if found.failed or found.unlisted:
        return warn(name, f"{detail}; {found.failed} not taken away, {found.unlisted} listings failed", todo)
    return good(name, detail)

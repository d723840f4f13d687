"""What is sampled, as figures: one pure function per source, from what it says to the table's series."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from actors.commands import ScalerStatus
from actors.driver import Resource
from actors.ports import Headroom
from infra.embedded.server_process import Status
from infra.metrics.catalogue import ROLLUP
from infra.metrics.lag import ViewLag
from infra.metrics.tally import Labels
from infra.reclaiming import Tally
from projections.backend import Gate


class Reading(NamedTuple):
    """One sampled figure: the metric's full name, its label values in the table's order, and the value."""

    metric: str
    labels: Labels
    value: float


def scaler_readings(statuses: Iterable[ScalerStatus], global_max_agents: int) -> Iterator[Reading]:
    """Yield the slots, the throttle and the gate of each scaler, from `FrontDoor.scalers`."""
    taken = 0
    for status in statuses:
        labels = (status.name, status.backend)
        taken += status.taken
        yield Reading("fleetlog_slots_taken", labels, status.taken)
        yield Reading("fleetlog_slots_max", labels, status.max_agents)
        yield Reading("fleetlog_spawns_running", labels, status.starting)
        yield Reading("fleetlog_spawns_waiting", labels, status.waiting)
        yield Reading("fleetlog_launch_failures_in_a_row", labels, status.failures)
        for gate in get_args(Gate):
            yield Reading("fleetlog_scaler_gate", (*labels, gate), float(gate == status.gate))
    yield Reading("fleetlog_slots_taken", (ROLLUP, ""), taken)
    yield Reading("fleetlog_slots_max", (ROLLUP, ""), global_max_agents)


def log_readings(headroom: Headroom) -> Iterator[Reading]:
    """Yield how full the log is, from `Journal.headroom`."""
    yield Reading("fleetlog_log_used_bytes", (), headroom.used_bytes)
    yield Reading("fleetlog_log_limit_bytes", (), headroom.limit_bytes)
    yield Reading("fleetlog_log_demand_limit_bytes", (), headroom.demand_limit_bytes)
    yield Reading("fleetlog_log_facts", (), headroom.facts)
    yield Reading("fleetlog_log_last_sequence", (), headroom.last_sequence)


def projection_readings(lags: Iterable[ViewLag]) -> Iterator[Reading]:
    """Yield how far each view is behind; of a view that another coordinator projects only that it is not parked."""
    for lag in lags:
        yield Reading("fleetlog_projection_parked", (lag.view,), float(lag.stage == "parked"))
        if lag.stage != "standby":
            yield Reading("fleetlog_projection_lag_facts", (lag.view,), lag.lag_facts)
            yield Reading("fleetlog_projection_lag_seconds", (lag.view,), lag.lag_s)


def server_readings(servers: Mapping[str, Status]) -> Iterator[Reading]:
    """Yield how the embedded servers are, by name, from `ServerProcess.status`."""
    for name, status in servers.items():
        yield Reading("fleetlog_embedded_server_up", (name,), float(status.running))
        yield Reading("fleetlog_embedded_server_restarts_total", (name,), status.restarts)


def message_readings(counts: Mapping[tuple[str, str], int]) -> Iterator[Reading]:
    """Yield the agents' door's messages by (verb, outcome), from its `counts`."""
    for labels, count in counts.items():
        yield Reading("fleetlog_agent_messages_total", labels, count)


def redelivery_readings(counts: Mapping[str, int]) -> Iterator[Reading]:
    """Yield the messages delivered again, by the name of the consumer."""
    for consumer, count in counts.items():
        yield Reading("fleetlog_redeliveries", (consumer,), count)


def actor_readings(restarts: int) -> Iterator[Reading]:
    """Yield how often actors were started again, from `Supervisor.restarts`."""
    yield Reading("fleetlog_actor_restarts_total", (), restarts)


def resource_readings(unaccounted: Iterable[Resource]) -> Iterator[Reading]:
    """Yield what the log does not account for, by kind, from `Supervisor.boot` or a later survey."""
    for kind, count in Counter(resource.kind for resource in unaccounted).items():
        yield Reading("fleetlog_unaccounted_resources", (kind,), count)


def sweep_readings(tally: Tally) -> Iterator[Reading]:
    """Yield what sweeps of the host came to since the start, by kind."""
    by_kind = {
        "fleetlog_orphans_found_total": tally.found,
        "fleetlog_orphans_reaped_total": tally.reaped,
        "fleetlog_orphans_failed_total": tally.failed,
        "fleetlog_orphans_spared": tally.spared,
    }
    for metric, counts in by_kind.items():
        for kind, count in counts.items():
            yield Reading(metric, (kind,), count)
    yield Reading("fleetlog_sweeps_total", (), tally.sweeps)
    yield Reading("fleetlog_sweep_listing_failures_total", (), tally.unlisted)


def ready_readings(backends: Mapping[str, str], lacks: Iterable[str]) -> Iterator[Reading]:
    """Yield for each scaler whether its host has what it needs; `lacks` are those for which it has not."""
    missing = frozenset(lacks)
    for name, backend in backends.items():
        yield Reading("fleetlog_scaler_ready", (name, backend), float(name not in missing))

"""Every metric there is, in one table: its name, kind, labels, where its value comes from and what it means."""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

Origin = Literal[
    "facts",  # counted when this process appends a fact
    "answers",  # counted when this process refuses a demand
    "sampled",  # read every few seconds; absent, and its source down, when it cannot be read
    "process",  # constant while the process lives
]

SPAWN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
"""From a container on a warm host to the longest spawn deadline in use, doubled."""

ROLLUP = "__global__"
"""The scaler label of a sum over all scalers of this coordinator."""

RECENT_S = 300.0
"""How far back `fleetlog_recent_failures` looks: the window of `doctor`."""


class Metric(NamedTuple):
    """One family. A counter's name ends in `_total`; units are seconds and bytes and stand last."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    origin: Origin
    meaning: str


_SCALER = ("scaler", "backend")

METRICS: tuple[Metric, ...] = (
    Metric(
        "fleetlog_agents", "gauge", (*_SCALER, "state"), "facts", "Agents whose life is not over, by state."
    ),
    Metric(
        "fleetlog_cpus_reserved",
        "gauge",
        _SCALER,
        "facts",
        "CPU cores requested by agents whose life is not over; scaler __global__ is the sum.",
    ),
    Metric(
        "fleetlog_memory_reserved_bytes",
        "gauge",
        _SCALER,
        "facts",
        "Memory requested by agents whose life is not over; scaler __global__ is the sum.",
    ),
    Metric("fleetlog_agents_requested_total", "counter", _SCALER, "facts", "Agents admitted."),
    Metric(
        "fleetlog_agents_ended_total",
        "counter",
        ("backend", "reason"),
        "facts",
        "Agents that take no more work, well or not, by why.",
    ),
    Metric(
        "fleetlog_agents_reaped_total",
        "counter",
        ("backend",),
        "facts",
        "Agents confirmed gone: their slot is free.",
    ),
    Metric(
        "fleetlog_agents_taken_up_total",
        "counter",
        ("backend",),
        "facts",
        "Agents found running after a restart and taken up again.",
    ),
    Metric(
        "fleetlog_failures_total",
        "counter",
        ("backend", "reason", "bound"),
        "facts",
        "Agents that failed; bound: a job waited for this very agent.",
    ),
    Metric(
        "fleetlog_teardown_failures_total",
        "counter",
        ("backend",),
        "facts",
        "Teardowns the host refused; each is tried again.",
    ),
    Metric(
        "fleetlog_recent_failures",
        "gauge",
        ("scaler", "bound"),
        "facts",
        "Agents that failed in the last 5 minutes, of at most 256.",
    ),
    Metric(
        "fleetlog_spawn_seconds",
        "histogram",
        ("backend",),
        "facts",
        "From an agent's turn in the throttle until its machine runs.",
    ),
    Metric(
        "fleetlog_demand_to_registered_seconds",
        "histogram",
        ("backend",),
        "facts",
        "From the admitted demand until the agent is registered.",
    ),
    Metric(
        "fleetlog_facts_uncounted_total",
        "counter",
        (),
        "facts",
        "Facts about machines these metrics do not know; rising means that other figures here are short.",
    ),
    Metric(
        "fleetlog_refusals_total",
        "counter",
        ("kind", "cap"),
        "answers",
        "Agents refused, by the answer's kind and the cap reached (none: no cap).",
    ),
    Metric(
        "fleetlog_slots_taken",
        "gauge",
        _SCALER,
        "sampled",
        "Slots held in each scaler; scaler __global__ is the sum.",
    ),
    Metric(
        "fleetlog_slots_max",
        "gauge",
        _SCALER,
        "sampled",
        "The most agents each scaler may have; scaler __global__: the coordinator.",
    ),
    Metric("fleetlog_spawns_running", "gauge", _SCALER, "sampled", "Spawns that run now."),
    Metric(
        "fleetlog_spawns_waiting",
        "gauge",
        _SCALER,
        "sampled",
        "Agents admitted that wait for their turn to spawn.",
    ),
    Metric(
        "fleetlog_launch_failures_in_a_row",
        "gauge",
        _SCALER,
        "sampled",
        "Launches failed since the last registration: above 0 the scaler backs off.",
    ),
    Metric(
        "fleetlog_scaler_gate", "gauge", (*_SCALER, "gate"), "sampled", "1 for the gate the scaler has now."
    ),
    Metric(
        "fleetlog_scaler_ready",
        "gauge",
        _SCALER,
        "sampled",
        "0 when the host lacks what the scaler needs: its spawns fail, and /health and `fleetlog doctor` say why.",
    ),
    Metric("fleetlog_log_used_bytes", "gauge", (), "sampled", "Size of the log."),
    Metric("fleetlog_log_limit_bytes", "gauge", (), "sampled", "Above this size the log takes nothing."),
    Metric(
        "fleetlog_log_demand_limit_bytes",
        "gauge",
        (),
        "sampled",
        "Above this size demand is refused; what is left is for teardown.",
    ),
    Metric("fleetlog_log_facts", "gauge", (), "sampled", "Facts in the log."),
    Metric("fleetlog_log_last_sequence", "gauge", (), "sampled", "Sequence of the newest fact in the log."),
    Metric(
        "fleetlog_projection_lag_facts",
        "gauge",
        ("view",),
        "sampled",
        "Facts of the log that are not in the view's tables.",
    ),
    Metric(
        "fleetlog_projection_lag_seconds",
        "gauge",
        ("view",),
        "sampled",
        "How long the view has been behind the log; 0 when it is level.",
    ),
    Metric(
        "fleetlog_projection_parked",
        "gauge",
        ("view",),
        "sampled",
        "1 when the view stopped at a fact it cannot pass and a person must look.",
    ),
    Metric(
        "fleetlog_embedded_server_up",
        "gauge",
        ("server",),
        "sampled",
        "1 when the server that we run for ourselves runs.",
    ),
    Metric(
        "fleetlog_embedded_server_restarts_total",
        "counter",
        ("server",),
        "sampled",
        "Times it died and was started again.",
    ),
    Metric(
        "fleetlog_agent_messages_total",
        "counter",
        ("verb", "outcome"),
        "sampled",
        "Messages from and to agents, by what was said and what came of it.",
    ),
    Metric(
        "fleetlog_redeliveries",
        "gauge",
        ("consumer",),
        "sampled",
        "Messages delivered again because the first delivery was not acknowledged in time.",
    ),
    Metric(
        "fleetlog_actor_restarts_total",
        "counter",
        (),
        "sampled",
        "Actors that died of a bug and were started again from the log.",
    ),
    Metric(
        "fleetlog_unaccounted_resources",
        "gauge",
        ("kind",),
        "sampled",
        "Things on the host with our mark that the log does not account for, as of the last sweep.",
    ),
    Metric(
        "fleetlog_orphans_found_total",
        "counter",
        ("kind",),
        "sampled",
        "Times a sweep met something with our mark that nobody accounts for; what is spared is met again.",
    ),
    Metric(
        "fleetlog_orphans_reaped_total",
        "counter",
        ("kind",),
        "sampled",
        "Things that sweeps took away: provably ours, dead, and owed to nobody.",
    ),
    Metric(
        "fleetlog_orphans_failed_total",
        "counter",
        ("kind",),
        "sampled",
        "Times something could not be taken away; it is tried again by the next sweep.",
    ),
    Metric(
        "fleetlog_orphans_spared",
        "gauge",
        ("kind",),
        "sampled",
        "Things the last sweep left alone because they live, or may: see `fleetlog orphans`.",
    ),
    Metric("fleetlog_sweeps_total", "counter", (), "sampled", "Sweeps of the host since the start."),
    Metric(
        "fleetlog_sweep_listing_failures_total",
        "counter",
        (),
        "sampled",
        "Listings of the host that failed in a sweep; nothing was concluded from them.",
    ),
    Metric(
        "fleetlog_source_up",
        "gauge",
        ("source",),
        "sampled",
        "1 when the figures of this source are fresh; at 0 they are left out, not frozen.",
    ),
    Metric(
        "fleetlog_process_start_time_seconds",
        "gauge",
        (),
        "process",
        "When the coordinator process started, in seconds since 1970.",
    ),
    Metric(
        "fleetlog_build_info",
        "gauge",
        ("version", "coordinator"),
        "process",
        "Always 1; what runs, and under which coordinator id.",
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def listing() -> str:
    """Return the table for people: one metric with its labels per line, and its meaning below it."""
    lines: list[str] = []
    for metric in METRICS:
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"{metric.name}{labels}  {metric.kind}, {metric.origin}")
        lines.append(f"    {metric.meaning}")
    return "\n".join(lines)

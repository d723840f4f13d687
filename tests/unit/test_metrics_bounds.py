"""Metrics stay bounded whatever is counted, and sampled figures go away rather than stale."""

from collections.abc import Iterable

from prometheus_client import generate_latest

from actors.commands import Answer, ScalerStatus
from actors.driver import Resource
from actors.ports import Headroom
from events.vm import (
    Failed,
    Reaped,
    Registered,
    Spawned,
    SpawnStarted,
)
from infra.embedded.server_process import Status
from infra.metrics.readings import (
    actor_readings,
    log_readings,
    message_readings,
    ready_readings,
    redelivery_readings,
    resource_readings,
    scaler_readings,
    server_readings,
    sweep_readings,
)
from infra.metrics.sampler import Source
from infra.reclaiming import Tally
from tests.unit.metrics_bench import BEGIN, HANDLE, Bench, requested


def test_ten_thousand_agents_do_not_grow_the_series() -> None:
    bench = Bench()

    def live(numbers: Iterable[int]) -> None:
        for number in numbers:
            vm, job = f"agent-{number}", f"job-{number}"
            bench.tell(vm, requested(job=job))
            bench.tell(vm, SpawnStarted())
            bench.tell(vm, Spawned(handle=HANDLE))
            bench.tell(vm, Registered(session=f"session-{number}"))
            bench.tell(vm, Failed(reason="exited", detail=f"detail {number}"))
            if number % 2:
                bench.tell(vm, Reaped(reason="exited", slot="s", evidence="e"))
            bench.metrics.refused(Answer(kind="at-capacity", cap="scaler-agents", vm=vm))

    live(range(2))
    before = bench.series()
    live(range(2, 10_000))
    assert bench.series() == before
    text = generate_latest(bench.registry).decode()
    assert "agent-" not in text.replace("scaler-agents", "")
    assert "job-" not in text
    assert "session" not in text


def test_a_scaler_that_is_not_configured_is_other() -> None:
    bench = Bench()
    for number in range(500):
        bench.tell(f"a{number}", requested(scaler=f"made-up-{number}"))
    assert bench.value("agents", scaler="other", backend="bare-metal", state="requested") == 500
    assert "made-up" not in generate_latest(bench.registry).decode()


def test_words_from_outside_fill_a_bounded_vocabulary_and_then_add_up_as_other() -> None:
    bench = Bench()
    counts = {("register", f"outcome-{number}"): 1 for number in range(1000)}
    bench.metrics.publish("agents", message_readings(counts))
    values = [
        sample
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "fleetlog_agent_messages_total"
    ]
    assert len(values) < 40
    assert sum(sample.value for sample in values) == 1000


def test_a_reload_brings_new_scalers_in_and_keeps_the_counters_of_old_ones() -> None:
    bench = Bench()
    bench.tell("a", requested())
    bench.metrics.configure({"large": "container"})
    assert bench.value("agents", scaler="large", backend="container", state="requested") == 0
    assert bench.value("agents", scaler="small", backend="bare-metal", state="requested") == 1
    bench.tell("a", Reaped(reason="drain", slot="", evidence=""))
    assert bench.value("agents", scaler="small", backend="bare-metal", state="requested") is None
    assert bench.value("agents_requested_total", scaler="small", backend="bare-metal") == 1


def test_refusals_are_counted_by_cap() -> None:
    bench = Bench()
    for answer in (
        Answer(kind="at-capacity", cap="global-agents"),
        Answer(kind="at-capacity", cap="global-agents"),
        Answer(kind="no-backend", message="none has these labels"),
    ):
        bench.metrics.refused(answer)
    assert bench.value("refusals_total", kind="at-capacity", cap="global-agents") == 2
    assert bench.value("refusals_total", kind="no-backend", cap="none") == 1


# Sampled.


def test_every_source_is_exported_as_what_it_says() -> None:
    bench = Bench()
    scaler = ScalerStatus(
        name="small",
        backend="bare-metal",
        gate="paused",
        max_agents=5,
        taken=3,
        starting=1,
        waiting=2,
        registered=1,
        failures=4,
        labels=(),
    )
    log = Headroom(used_bytes=70, limit_bytes=100, demand_limit_bytes=90, facts=9, last_sequence=12)
    publish = bench.metrics.publish
    publish("scalers", scaler_readings([scaler], 50))
    publish("log", log_readings(log))
    publish("servers", server_readings({"nats": Status(running=True, restarts=2, trouble=None)}))
    publish("agents", message_readings({("beat", "taken"): 7}))
    publish("consumers", redelivery_readings({"provisioner": 3}))
    publish("actors", actor_readings(1))
    publish("host", resource_readings([Resource(kind="cgroup", name=n, vm=None, owner=None) for n in "ab"]))
    publish("host parts", ready_readings({"small": "bare-metal"}, {"small": ("no kvm",)}))
    publish(
        "sweeps",
        sweep_readings(
            Tally(
                found={"tap": 3},
                reaped={"tap": 2},
                failed={"tap": 1},
                spared={"chroot": 4},
                sweeps=5,
                unlisted=6,
            )
        ),
    )
    small = {"scaler": "small", "backend": "bare-metal"}
    everything = {"scaler": "__global__", "backend": ""}
    assert bench.value("slots_taken", **small) == 3
    assert bench.value("slots_max", **small) == 5
    assert bench.value("slots_taken", **everything) == 3
    assert bench.value("slots_max", **everything) == 50
    assert bench.value("spawns_waiting", **small) == 2
    assert bench.value("spawns_running", **small) == 1
    assert bench.value("launch_failures_in_a_row", **small) == 4
    assert bench.value("scaler_gate", **small, gate="paused") == 1
    assert bench.value("scaler_gate", **small, gate="open") == 0
    assert bench.value("log_used_bytes") == 70
    assert bench.value("log_limit_bytes") == 100
    assert bench.value("log_demand_limit_bytes") == 90
    assert bench.value("log_facts") == 9
    assert bench.value("log_last_sequence") == 12
    assert bench.value("embedded_server_up", server="nats") == 1
    assert bench.value("embedded_server_restarts_total", server="nats") == 2
    assert bench.value("agent_messages_total", verb="beat", outcome="taken") == 7
    assert bench.value("redeliveries", consumer="provisioner") == 3
    assert bench.value("actor_restarts_total") == 1
    assert bench.value("unaccounted_resources", kind="cgroup") == 2
    assert bench.value("orphans_found_total", kind="tap") == 3
    assert bench.value("orphans_reaped_total", kind="tap") == 2
    assert bench.value("orphans_failed_total", kind="tap") == 1
    assert bench.value("orphans_spared", kind="chroot") == 4
    assert bench.value("sweeps_total") == 5
    assert bench.value("scaler_ready", **small) == 0
    assert bench.value("sweep_listing_failures_total") == 6
    assert bench.value("build_info", version="1.2", coordinator="alpha") == 1
    assert bench.value("process_start_time_seconds") == BEGIN.timestamp()


def test_a_source_that_fails_takes_its_figures_away() -> None:
    bench = Bench()
    bench.metrics.publish("actors", actor_readings(1))
    assert bench.value("source_up", source="actors") == 1
    bench.metrics.publish("actors", None)
    assert bench.value("source_up", source="actors") == 0
    assert bench.value("actor_restarts_total") is None


def test_figures_that_nobody_renews_go_away_by_themselves() -> None:
    bench = Bench()
    bench.metrics.publish("actors", actor_readings(1))
    bench.clock.advance(29)
    assert bench.value("actor_restarts_total") == 1
    bench.clock.advance(2)
    assert bench.value("actor_restarts_total") is None
    assert bench.value("source_up", source="actors") == 0


def test_a_scrape_asks_no_source() -> None:
    bench = Bench()
    asked: list[int] = []

    def restarts() -> int:
        asked.append(1)
        return 5

    source = Source("actors", restarts, actor_readings)
    source.sample(bench.metrics)
    for _ in range(3):
        assert bench.value("actor_restarts_total") == 5
    assert len(asked) == 1

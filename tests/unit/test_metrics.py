"""Metrics: what facts add up to, which series there may be, and that nothing stands still when its source does."""

import threading
from collections import Counter
from typing import Any, get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from events.envelope import Event, Resources
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Reaped,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownConfirmed,
    TeardownFailed,
    VmEvent,
)
from infra.metrics.catalogue import METRICS, listing
from infra.metrics.fleet_metrics import FleetMetrics
from infra.metrics.lives import PHASES, Lives
from projections.boot import fold_fleet
from projections.vm import VmState, evolve
from tests.fleet_log import SCALERS, Story
from tests.unit.metrics_bench import BEGIN, HANDLE, Bench, recorded, requested


def test_every_exported_name_is_in_the_table_with_its_kind_and_labels() -> None:
    bench = Bench()
    exported = {family.name: family for family in bench.registry.collect()}
    for metric in METRICS:
        family = exported.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind, metric.name
        assert family.documentation == metric.meaning
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
    assert not exported, "exported and not in the table"


def test_the_table_keeps_the_naming_rules() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("fleetlog_")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.meaning.endswith("."), metric.name
        assert not {"agent", "vm", "job", "run", "session", "demand"} & {*metric.labels}, metric.name


def test_the_listing_has_every_metric_with_its_labels() -> None:
    text = listing()
    assert "fleetlog_agents{scaler,backend,state}  gauge, facts" in text
    assert all(metric.meaning in text for metric in METRICS)


def test_both_expositions_are_well_formed() -> None:
    bench = Bench()
    bench.tell("a", requested())
    bench.tell("a", SpawnStarted())
    bench.tell("a", Spawned(handle=HANDLE), 0.7)
    openmetrics = generate_openmetrics(bench.registry).decode()  # type: ignore[no-untyped-call]
    parsed = text_string_to_metric_families(openmetrics)  # type: ignore[no-untyped-call]
    assert {family.name for family in parsed} == {metric.name.removesuffix("_total") for metric in METRICS}
    assert b"_created" not in generate_latest(bench.registry)


def test_two_in_one_registry_are_refused() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="Duplicated"):
        FleetMetrics(bench.registry, bench.clock, coordinator="b", version="1", scalers={})


# Counted from facts.


def test_a_life_is_in_exactly_one_state_until_it_is_reaped() -> None:
    bench = Bench()

    def states() -> dict[str, float]:
        return {
            sample.labels["state"]: sample.value
            for family in bench.registry.collect()
            for sample in family.samples
            if sample.name == "fleetlog_agents" and sample.value
        }

    steps: list[tuple[Event, str]] = [
        (requested(), "requested"),
        (SpawnStarted(), "starting"),
        (Spawned(handle=HANDLE), "spawned"),
        (Registered(session="s"), "registered"),
        (ConfigAcked(), "registered"),
        (Draining(reason="job-complete"), "draining"),
        (TeardownFailed(detail="busy", tries=1, retry_in_s=1), "draining"),
    ]
    for event, state in steps:
        bench.tell("a", event)
        assert states() == {state: 1}
    bench.tell("a", Reaped(reason="job-complete", slot="s", evidence="gone"))
    assert states() == {}


def test_the_phases_agree_with_the_fold_for_every_event() -> None:
    begun = evolve(None, requested(), recorded("a", requested(), 1, BEGIN))
    samples: dict[type, Any] = {
        SpawnStarted: SpawnStarted(),
        Spawned: Spawned(handle=HANDLE),
        Registered: Registered(session="s"),
        ConfigAcked: ConfigAcked(),
        Draining: Draining(reason="drain"),
        Failed: Failed(reason="exited", detail=""),
        TeardownConfirmed: TeardownConfirmed(target="t", evidence="e"),
        TeardownFailed: TeardownFailed(detail="", tries=1, retry_in_s=1),
        Reaped: Reaped(reason="drain", slot="s", evidence="e"),
        TakenUp: TakenUp(coordinator="c", evidence="e"),
        Adopted: Adopted(owner="o"),
        Condemned: Condemned(reason="operator", evidence="e"),
        Spared: Spared(evidence="e"),
    }
    assert {Requested, *samples} == set(get_args(VmEvent))
    for kind, event in samples.items():
        after = evolve(begun, event, recorded("a", event, 2, BEGIN))
        assert after.phase == PHASES.get(kind, "requested"), kind


@pytest.mark.parametrize("seed", range(5))
def test_any_log_counts_as_the_fold_of_the_same_log(seed: int) -> None:
    bench = Bench(dict.fromkeys(SCALERS, "bare-metal"))
    facts = Story(seed).run(1500).facts
    for fact in facts:
        bench.metrics.observe(fact)
    live = fold_fleet(facts).vms.values()
    agents = Counter((state.scaler, state.phase) for state in live)
    assert agents
    for scaler in SCALERS:
        for phase in ("requested", "starting", "spawned", "registered", "draining", "failed"):
            found = bench.value("agents", scaler=scaler, backend="bare-metal", state=phase)
            assert found == agents[scaler, phase], (scaler, phase)
        cpus = sum(state.requests.cpus for state in live if state.scaler == scaler)
        assert bench.value("cpus_reserved", scaler=scaler, backend="bare-metal") == pytest.approx(cpus)
    memory_bytes = sum(state.requests.memory_bytes for state in live)
    assert bench.value("memory_reserved_bytes", scaler="__global__", backend="") == memory_bytes
    kinds = Counter(type(fact.event) for fact in facts)
    assert bench.value("agents_reaped_total", backend="bare-metal") == kinds[Reaped]
    assert bench.value("agents_taken_up_total", backend="bare-metal") == kinds[TakenUp]
    assert bench.value("teardown_failures_total", backend="bare-metal") == kinds[TeardownFailed]
    assert bench.value("facts_uncounted_total") == 0
    ended = {fact.aggregate for fact in facts if isinstance(fact.event, Draining | Failed)}
    assert _total(bench, "fleetlog_agents_ended_total") == len(ended)
    assert _total(bench, "fleetlog_failures_total") == kinds[Failed]


def _total(bench: Bench, name: str) -> float:
    return sum(s.value for f in bench.registry.collect() for s in f.samples if s.name == name)


def test_latencies_are_measured_between_the_facts_times() -> None:
    bench = Bench()
    bench.tell("a", requested())
    bench.tell("a", SpawnStarted(), 3)
    bench.tell("a", Spawned(handle=HANDLE), 0.5)
    bench.tell("a", Registered(session="s"), 4)
    assert bench.value("spawn_seconds_count", backend="bare-metal") == 1
    assert bench.value("spawn_seconds_sum", backend="bare-metal") == 0.5
    assert bench.value("spawn_seconds_bucket", backend="bare-metal", le="0.5") == 1
    assert bench.value("spawn_seconds_bucket", backend="bare-metal", le="0.25") == 0
    assert bench.value("demand_to_registered_seconds_sum", backend="bare-metal") == 7.5
    assert bench.value("demand_to_registered_seconds_bucket", backend="bare-metal", le="+Inf") == 1


def test_a_clock_that_stepped_back_gives_no_negative_latency() -> None:
    bench = Bench()
    bench.tell("a", requested())
    bench.tell("a", SpawnStarted())
    bench.tell("a", Spawned(handle=HANDLE), -60)
    assert bench.value("spawn_seconds_sum", backend="bare-metal") == 0
    assert bench.value("spawn_seconds_count", backend="bare-metal") == 1


def test_failures_say_why_and_whether_a_job_waited() -> None:
    bench = Bench()
    for vm, job in (("a", "job-1"), ("b", None), ("c", None)):
        bench.tell(vm, requested(job=job))
        bench.tell(vm, Failed(reason="launch-failed", detail="no"))
    assert bench.value("failures_total", backend="bare-metal", reason="launch-failed", bound="true") == 1
    assert bench.value("failures_total", backend="bare-metal", reason="launch-failed", bound="false") == 2
    assert bench.value("recent_failures", scaler="small", bound="false") == 2
    recent = bench.metrics.recent_failures()["small"]
    assert (recent.bound, recent.unbound, recent.last_detail) == (1, 2, "no")
    bench.clock.advance(301)
    assert bench.value("recent_failures", scaler="small", bound="false") == 0


def test_a_fact_seen_twice_counts_once() -> None:
    bench = Bench()
    told = [bench.tell("a", requested()), bench.tell("a", Failed(reason="exited", detail=""))]
    for fact in told:
        bench.metrics.observe(fact)
    assert bench.value("agents_requested_total", scaler="small", backend="bare-metal") == 1
    assert bench.value("failures_total", backend="bare-metal", reason="exited", bound="false") == 1


def test_a_life_found_at_boot_is_followed_and_not_counted_as_new() -> None:
    bench = Bench()
    mine = _state("mine", owner="alpha")
    bench.metrics.seed([mine, _state("theirs", owner="beta")])
    bench.metrics.seed([mine, _state("theirs", owner="beta")])  # a boot may fold again
    assert bench.value("agents", scaler="small", backend="bare-metal", state="requested") == 1
    assert bench.value("agents_requested_total", scaler="small", backend="bare-metal") == 0
    bench.metrics.observe(recorded("mine", TakenUp(coordinator="alpha", evidence=""), 2, BEGIN))
    bench.metrics.observe(recorded("mine", Reaped(reason="drain", slot="", evidence=""), 3, BEGIN))
    assert bench.value("agents", scaler="small", backend="bare-metal", state="requested") == 0
    assert bench.value("agents_taken_up_total", backend="bare-metal") == 1
    assert bench.value("cpus_reserved", scaler="__global__", backend="") == 0


def _state(vm: str, owner: str) -> VmState:
    event = requested(requests=Resources(cpus=2))
    event = Requested(**{name: getattr(event, name) for name in event.__struct_fields__} | {"owner": owner})
    return evolve(None, event, recorded(vm, event, 1, BEGIN))


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    bench = Bench()
    bench.metrics.observe(recorded("unheard-of", Reaped(reason="drain", slot="", evidence=""), 9, BEGIN))
    assert bench.value("facts_uncounted_total") == 1
    assert bench.value("agents_reaped_total", backend="bare-metal") == 0


def test_lives_beyond_the_bound_are_counted_and_not_kept() -> None:
    lives = Lives(lives_max=10)
    bench = Bench(lives=lives)
    for number in range(25):
        bench.tell(f"a{number}", requested())
    assert len(lives) == 10
    assert bench.value("agents_requested_total", scaler="small", backend="bare-metal") == 25


def test_a_broken_fact_never_reaches_the_actor_that_told_it(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.tell("a", requested())
    broken = recorded("a", Spawned(handle=HANDLE), 2, "no time at all")  # type: ignore[arg-type]
    bench.tell("a", SpawnStarted())
    bench.metrics.observe(recorded("a", Spawned(handle=HANDLE), 3, "no time at all"))  # type: ignore[arg-type]
    bench.metrics.observe(broken)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "vm.a:3" in caplog.text


def test_facts_from_many_threads_are_all_counted() -> None:
    bench = Bench()

    def live(thread: int) -> None:
        for number in range(200):
            vm = f"a{thread}-{number}"
            bench.metrics.observe(recorded(vm, requested(), 1, BEGIN))
            bench.metrics.observe(recorded(vm, Reaped(reason="drain", slot="", evidence=""), 2, BEGIN))
            if number % 50 == 0:
                assert list(bench.registry.collect())

    threads = [threading.Thread(target=live, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.value("agents_reaped_total", backend="bare-metal") == 800
    assert bench.value("agents", scaler="small", backend="bare-metal", state="requested") == 0


# Cardinality.

"""Metrics: what facts add up to, which series there may be, and that nothing stands still when its source does."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from actors.commands import Answer, ScalerStatus
from actors.driver import Resource
from actors.ports import Headroom
from actors.projector import ProjectorStatus
from events.envelope import Event, Recorded, Resources
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownFailed,
    VmEvent,
)
from infra.embedded.server_process import Status
from infra.metrics.catalogue import METRICS, listing
from infra.metrics.fleet_metrics import FleetMetrics
from infra.metrics.lag import ProjectionLag
from infra.metrics.lives import PHASES, Lives
from infra.metrics.readings import (
    Reading,
    actor_readings,
    log_readings,
    message_readings,
    projection_readings,
    redelivery_readings,
    resource_readings,
    scaler_readings,
    server_readings,
)
from infra.metrics.sampler import Sampler, Source
from projections.boot import fold_fleet
from projections.vm import VmState, evolve
from tests.fleet_log import SCALERS, Story

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
HANDLE = Handle(driver="scripted", version=1, data={})


class HandClock:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.at = BEGIN

    def now(self) -> datetime:
        return self.at

    def monotonic_s(self) -> float:
        return (self.at - BEGIN).total_seconds()

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class Bench:
    """Metrics on a registry of their own, and facts told to them."""

    def __init__(self, scalers: dict[str, str] | None = None, *, lives: Lives | None = None) -> None:
        self.clock = HandClock()
        self.registry = CollectorRegistry()
        self.metrics = FleetMetrics(
            self.registry,
            self.clock,
            coordinator="alpha",
            version="1.2",
            scalers={"small": "bare-metal"} if scalers is None else scalers,
            lives=lives,
        )
        self._sequence = 0
        self._versions: dict[str, int] = {}

    def tell(self, vm: str, event: Event, after_s: float = 0.0) -> Recorded:
        self.clock.advance(after_s)
        self._sequence += 1
        version = self._versions[vm] = self._versions.get(vm, 0) + 1
        fact = recorded(vm, event, version, self.clock.at, self._sequence)
        self.metrics.observe(fact)
        return fact

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"fleetlog_{name}", labels)

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in self.registry.collect()
            for sample in family.samples
        }


def recorded(vm: str, event: Event, version: int, at: datetime, sequence: int = 1) -> Recorded:
    return Recorded(
        sequence=sequence,
        aggregate=f"vm.{vm}",
        version=version,
        at=at,
        writer="alpha",
        epoch=0,
        cause="c",
        correlation="c",
        attempt="a",
        event=event,
    )


def requested(scaler: str = "small", job: str | None = None, **changes: Any) -> Requested:
    return Requested(
        scaler=scaler,
        backend="bare-metal",
        slot=f"backend.alpha.{scaler}",
        owner="alpha",
        host="h",
        boot_id="b",
        labels=("linux",),
        job=job,
        **changes,
    )


# The table.


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
    assert bench.value("redeliveries_total", consumer="provisioner") == 3
    assert bench.value("actor_restarts_total") == 1
    assert bench.value("unaccounted_resources", kind="cgroup") == 2
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


def test_lag_grows_while_a_parked_view_says_nothing_new() -> None:
    clock = HandClock()
    status = ProjectorStatus(view="fleet", stage="live", sequence=10, head=10)
    end = 10
    lag = ProjectionLag(lambda: (status,), lambda: end, clock.monotonic_s)
    assert lag.look()[0].lag_s == 0
    status = ProjectorStatus(
        view="fleet", stage="parked", sequence=10, head=10, parked_at=11, reason="poison"
    )
    end = 12
    clock.advance(5)
    (seen,) = lag.look()
    assert (seen.lag_facts, seen.lag_s) == (2, 5)
    clock.advance(60)
    end = 40
    (seen,) = lag.look()
    assert (seen.lag_facts, seen.lag_s, seen.stage) == (30, 65, "parked")
    bench = Bench()
    bench.metrics.publish("projections", projection_readings([seen]))
    assert bench.value("projection_parked", view="fleet") == 1
    assert bench.value("projection_lag_facts", view="fleet") == 30
    assert bench.value("projection_lag_seconds", view="fleet") == 65


def test_a_view_that_another_coordinator_projects_has_no_lag_here() -> None:
    clock = HandClock()
    lag = ProjectionLag(
        lambda: (ProjectorStatus(view="fleet", stage="standby", sequence=0),), lambda: 99, clock.monotonic_s
    )
    bench = Bench()
    bench.metrics.publish("projections", projection_readings(lag.look()))
    assert bench.value("projection_lag_facts", view="fleet") is None
    assert bench.value("projection_parked", view="fleet") == 0


# The sampler.


def until(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not done():
        assert time.monotonic() < deadline_s, "not within the deadline"
        pause.wait(0.005)


def test_a_source_that_hangs_holds_up_no_other_and_no_stop() -> None:
    bench = Bench()
    release = threading.Event()
    rounds: list[int] = []

    def hang() -> int:
        release.wait(30)
        return 0

    def count() -> int:
        rounds.append(1)
        return len(rounds)

    sampler = Sampler(
        bench.metrics,
        [Source("stuck", hang, lambda _: []), Source("actors", count, actor_readings)],
        period_s=0.01,
    )
    sampler.start()
    try:
        until(lambda: (bench.value("actor_restarts_total") or 0) >= 3)
        assert bench.value("source_up", source="stuck") == 0
        began_s = time.monotonic()
        assert not sampler.stop(timeout_s=0.2)
        assert time.monotonic() - began_s < 2
    finally:
        release.set()
        assert sampler.stop(timeout_s=5)


def test_starting_waits_for_the_first_answers_and_no_longer_than_told() -> None:
    bench = Bench()
    release = threading.Event()

    def slow() -> int:
        release.wait(0.1)
        return 3

    sampler = Sampler(bench.metrics, [Source("actors", slow, actor_readings)], period_s=60)
    sampler.start()
    assert bench.value("actor_restarts_total") == 3
    assert sampler.stop()
    stuck = Sampler(bench.metrics, [Source("actors", lambda: int(release.wait(30)), actor_readings)])
    began_s = time.monotonic()
    stuck.start(first_s=0.2)
    assert time.monotonic() - began_s < 5
    release.set()
    assert stuck.stop(timeout_s=5)


def test_a_source_that_fails_comes_back_and_each_outage_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    tries: list[int] = []

    def flaky() -> int:
        tries.append(1)
        if 2 <= len(tries) <= 5:
            raise OSError("the log does not answer")
        return len(tries)

    source = Source("actors", flaky, actor_readings)
    with caplog.at_level("INFO", "fleetlog.metrics"):
        source.sample(bench.metrics)
        assert source.latest() == 1
        for _ in range(4):
            source.sample(bench.metrics)
            assert source.latest() is None
            assert bench.value("source_up", source="actors") == 0
        source.sample(bench.metrics)
    assert source.latest() == 6
    assert bench.value("actor_restarts_total") == 6
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "no figures from actors: OSError: the log does not answer",
        "figures from actors are back",
    ]


def test_figures_the_table_does_not_know_take_their_source_down() -> None:
    bench = Bench()
    source = Source("odd", lambda: 1, lambda value: [Reading("fleetlog_made_up", (), value)])
    source.sample(bench.metrics)
    assert bench.value("source_up", source="odd") == 0


def test_what_a_source_said_last_goes_stale() -> None:
    clock = HandClock()
    source = Source("x", lambda: 5, lambda _: [], stale_after_s=10, monotonic_s=clock.monotonic_s)
    source.sample(Bench().metrics)
    assert source.latest() == 5
    clock.advance(11)
    assert source.latest() is None

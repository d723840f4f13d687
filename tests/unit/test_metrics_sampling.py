"""Lag and sampling: what stands still is not taken for level, and one slow source holds up no other."""

import threading
import time
from collections.abc import Callable

import pytest

from actors.projector import ProjectorStatus
from infra.metrics.lag import ProjectionLag
from infra.metrics.readings import (
    Reading,
    actor_readings,
    projection_readings,
)
from infra.metrics.sampler import Sampler, Source
from tests.unit.metrics_bench import Bench, HandClock


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

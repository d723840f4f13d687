"""The real coordinator is killed at every named point between two steps of a life, and started again.

Each time: one machine per request, none lost, none leaked, the end the life should have, and `verify` finds nothing.
"""

from __future__ import annotations

import ast
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import events.codec  # noqa: F401 - brings every module of events, so that all events are there
from events.envelope import Event
from infra.embedded.postgres_server import EmbeddedPostgres
from projections.backend import BackendState, Gate
from projections.backend import evolve as evolve_backend
from projections.vm import VmState
from tests.acceptance.conftest import servers_of
from tests.acceptance.host import wait_until
from tests.acceptance.place import Place
from tests.conftest import NatsServer

REPOSITORY = Path(__file__).parents[2]

# Where it dies -> with which reason the life ends. It dies in the life of an agent with a short job.
QUICK = {
    "spawn:before": "job-complete",
    "bare-metal.spawn.directory": "launch-failed",
    "bare-metal.spawn.cgroup": "launch-failed",
    "bare-metal.spawn.started": "job-complete",
    "bare-metal.spawn.recorded": "job-complete",
    "spawn:after": "job-complete",
    "vm.spawned:before-append": "job-complete",
    "vm.spawned:after-append": "job-complete",
    "vm.registered:before-append": "job-complete",
    "vm.registered:after-append": "job-complete",
    "vm.config_acked:before-append": "job-complete",
    "vm.config_acked:after-append": "job-complete",
    "vm.draining:before-append": "job-complete",
    "vm.draining:after-append": "job-complete",
    "teardown:before": "job-complete",
    "bare-metal.destroy.ended": "job-complete",
    "teardown:after": "job-complete",
    "vm.reaped:before-append": "job-complete",
    "vm.reaped:after-append": "job-complete",
}
REQUEST = ("vm.requested", "demand.placed")
LIFE = ("vm.spawn_started", "vm.failed", "vm.taken_up", "vm.teardown_failed")
GATES = {"pause": "backend.paused", "resume": "backend.resumed", "drain": "backend.drain_started"}

LIVES_TEST = "test_killed_in_a_life_the_next_coordinator_brings_it_to_its_end"
LIVES_AT_ONCE = 3

NEVER_LAST = {
    "vm.condemned": "vm.draining comes with it in the same batch",
    "backend.slot_taken": "vm.requested comes with it in the same batch",
    "coordinator.slot_taken": "vm.requested comes with it in the same batch",
    "allocator.leased": "vm.requested comes with it in the same batch",
    "coordinator.started": "written while nothing runs, before the first step of any life",
    "coordinator.config_applied": "written while nothing runs, with coordinator.started",
    "coordinator.stopped": "written when everything has ended",
    "vm.adopted": "nobody writes it yet: one coordinator takes over from another",
    "claim.registered": "vm.spawn_started comes before it in the same batch, which is named by that",
    "claim.redeemed": "written by a front door that keeps nothing: its own tests lose its answer",
    "scale.up": "vm.spawn_started comes before it in the same batch, which is named by that",
    "scale.down": "the end of a life comes before it in the same batch, which is named by that",
    "vm.teardown_confirmed": "of a machine with two targets; a restart is in the simulation",
    "vm.spared": "nobody writes it yet: it is the reaper's",
}


def both(*tags: str) -> list[str]:
    return [f"{tag}:{when}-append" for tag in tags for when in ("before", "after")]


def test_every_crash_point_has_its_test() -> None:
    tags = {str(event.__struct_config__.tag) for event in Event.__subclasses__() if is_real(event)}
    assert set(NEVER_LAST) <= tags
    there = set(both(*(tags - set(NEVER_LAST)))) | literal_points()
    tested = {*QUICK, *both(*REQUEST, *LIFE, *GATES.values())}
    assert tested <= there, "a point that is no more"
    elsewhere = {point for point in there - tested if is_tested_elsewhere(point)}
    assert there - tested - elsewhere == set(), "a point whose crash nothing tests"


def is_real(event: type[Event]) -> bool:
    """Tell an event from those that tests make up."""
    return event.__module__.startswith("events.")


def is_tested_elsewhere(point: str) -> bool:
    """Tell whether another test names the point: a driver that needs a device of the kernel has tests of its own."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return any(f'"{point}"' in path.read_text() for path in files if path != Path(__file__))


def literal_points() -> set[str]:
    """Return the points named in the code, by its calls of `reach`; the driver that only pretends is no part of it."""
    found: set[str] = set()
    for path in (path for folder in ("actors", "infra") for path in (REPOSITORY / folder).rglob("*.py")):
        if path.name == "scripted.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="reach" | "_reach"), args=[name]):
                    found |= literal_point(name, f"{path}:{node.lineno}")
                case _:
                    pass
    return found


def literal_point(name: ast.expr, where: str) -> set[str]:
    match name:
        case ast.Constant(str(text)):
            return {text}
        case ast.JoinedStr([ast.FormattedValue(), ast.Constant(":before-append" | ":after-append")]):
            return set()  # one for each tag: those are counted by the events there are
        case ast.JoinedStr([ast.Constant("reclaim."), ast.FormattedValue()]):
            return {"reclaim.chroot", "reclaim.tap", "reclaim.rules", "reclaim.cgroup"}  # by kind of leftover
        case _:
            raise AssertionError(f"{where}: a point whose name cannot be read from the code")


@pytest.fixture(scope="module")
def killed_lives(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    nats_server: NatsServer,
    postgres_server: EmbeddedPostgres,
) -> Iterator[dict[str, Future[VmState]]]:
    """Every life that is asked for, a few at a time: most of one is waiting for an agent to ask again."""
    wanted = [
        str(item.callspec.params["point"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == LIVES_TEST
    ]
    with ThreadPoolExecutor(LIVES_AT_ONCE) as pool:
        yield {
            point: pool.submit(
                killed_life,
                Place(
                    tmp_path_factory.mktemp("life"),
                    servers_of(nats_server, postgres_server.dsn_of("fleetlog")),
                ),
                point,
            )
            for point in wanted
        }
        pool.shutdown(cancel_futures=True)


def killed_life(place: Place, point: str) -> VmState:
    try:
        first = place.start(crash_at=point)
        with place.asking("demand", "--labels", "quick"):
            assert first.wait_dead() == -signal.SIGKILL
        place.start()
        place.wait_all_reaped()
        (state,) = place.lives().values()
        assert place.starts() in ({}, {state.id: 1})
        assert bool(place.starts()) == (state.reason == "job-complete")
        place.settle()
        return state
    finally:
        place.clean()


@pytest.mark.parametrize(("point", "reason"), QUICK.items())
def test_killed_in_a_life_the_next_coordinator_brings_it_to_its_end(
    killed_lives: dict[str, Future[VmState]], point: str, reason: str
) -> None:
    state = killed_lives[point].result()
    assert state.reason == reason
    assert state.exit_code == (0 if reason == "job-complete" else None)


@pytest.mark.parametrize("point", both(*REQUEST))
def test_killed_while_it_decides_a_demand_that_is_asked_again_a_job_gets_one_machine(
    quick_place: Place, point: str
) -> None:
    job = ("--job", "build-17") if point.startswith("demand.") else ()
    first = quick_place.start(crash_at=point)
    with quick_place.asking("demand", "--labels", "held", *job):
        assert first.wait_dead() == -signal.SIGKILL
    stored = point.endswith(":after-append")
    assert len(quick_place.lives()) == stored
    quick_place.start()
    machine = quick_place.demand("held", *job)
    # Without a job nobody can know that both are the same wish; with one the first machine is the answer.
    assert len(quick_place.lives()) == (2 if stored and not job else 1)
    quick_place.wait_phase(machine, "registered")
    quick_place.open_gate()
    quick_place.wait_all_reaped()
    assert {state.reason for state in quick_place.lives().values()} == {"job-complete"}
    quick_place.settle()


@pytest.mark.parametrize("point", both("vm.spawn_started"))
def test_killed_when_the_turn_comes_of_a_machine_that_waited_both_have_their_life(
    quick_place: Place, point: str
) -> None:
    quick_place.configure(max_concurrent_spawns=1)
    first = quick_place.start(crash_at=point)
    with quick_place.asking("demand", "--labels", "quick", "--count", "2"):
        assert first.wait_dead() == -signal.SIGKILL
    stored = point.endswith(":after-append")
    assert [state.phase == "requested" for state in quick_place.lives().values()].count(True) == (not stored)
    quick_place.start()
    quick_place.wait_all_reaped()
    lives = quick_place.lives()
    assert [state.reason for state in lives.values()] == ["job-complete", "job-complete"]
    assert quick_place.starts() == dict.fromkeys(lives, 1)
    quick_place.settle()


@pytest.mark.parametrize("point", both("vm.failed"))
def test_killed_when_an_agent_failed_the_failure_is_recorded_once(quick_place: Place, point: str) -> None:
    first = quick_place.start(crash_at=point)
    vm_id = quick_place.demand("broken")
    assert first.wait_dead() == -signal.SIGKILL
    quick_place.start()
    quick_place.wait_all_reaped()
    state = quick_place.lives()[vm_id]
    assert state.reason == "exited-early"
    assert state.exit_code == (3 if point.endswith(":after-append") else None), "never a guess"
    quick_place.settle()


@pytest.mark.parametrize("point", both("vm.taken_up"))
def test_killed_when_it_takes_an_agent_up_the_next_one_does(quick_place: Place, point: str) -> None:
    first = quick_place.start()
    vm_id = quick_place.demand("held")
    quick_place.wait_phase(vm_id, "registered")
    first.kill()
    second = quick_place.launch(crash_at=point)
    assert second.wait_dead() == -signal.SIGKILL
    quick_place.start()
    quick_place.open_gate()
    quick_place.wait_all_reaped()
    assert quick_place.lives()[vm_id].reason == "job-complete"
    assert quick_place.starts() == {vm_id: 1}
    quick_place.settle()


@pytest.mark.parametrize("point", both("vm.teardown_failed"))
def test_killed_when_a_teardown_failed_it_is_tried_on_until_it_succeeds(
    quick_place: Place, point: str
) -> None:
    first = quick_place.start(crash_at=point)
    vm_id = quick_place.demand("stubborn")
    assert first.wait_dead() == -signal.SIGKILL
    quick_place.start()
    quick_place.wait_for(lambda lives: lives[vm_id].teardown_tries > 0, "a failed teardown is recorded")
    assert quick_place.lives()[vm_id].phase == "draining", "and the machine is owed it still"
    quick_place.unclose_all()
    quick_place.wait_all_reaped()
    quick_place.settle()


@pytest.mark.parametrize("point", both(*GATES.values()))
def test_killed_when_a_scaler_is_paused_opened_or_drained_the_log_says_which_it_is(
    quick_place: Place, point: str
) -> None:
    verb = next(verb for verb, tag in GATES.items() if point.startswith(tag))
    before: Gate = "open"
    if verb == "resume":
        opened = quick_place.start()
        quick_place.ask("scaler", "pause", "metal")
        opened.kill()
        before = "paused"
    first = quick_place.start(crash_at=point)
    with quick_place.asking("scaler", verb, "metal"):
        assert first.wait_dead() == -signal.SIGKILL
    after: Gate = {"pause": "paused", "resume": "open", "drain": "draining"}[verb]  # type: ignore[assignment]
    assert gate(quick_place) == (after if point.endswith(":after-append") else before)
    last = quick_place.start()
    quick_place.ask("scaler", verb, "metal")
    assert gate(quick_place) == after
    (answer,) = quick_place.ask("demand", "-l", "quick", expect=0 if verb == "resume" else 1)["answers"]
    assert answer["kind"] == ("spawning" if verb == "resume" else "refused")
    if verb == "resume":
        quick_place.wait_all_reaped()
    quick_place.verify()
    last.stop()


def gate(place: Place) -> str:
    state = BackendState()
    for fact in place.facts():
        if fact.aggregate.startswith("backend."):
            state = evolve_backend(state, fact.event, fact)
    return state.gate


def test_a_point_is_passed_as_often_as_asked_before_it_kills(quick_place: Place) -> None:
    first = quick_place.start(crash_at="vm.reaped:after-append#2")
    quick_place.demand("quick")
    quick_place.wait_all_reaped()
    assert first.process.poll() is None
    quick_place.demand("quick")
    assert first.wait_dead() == -signal.SIGKILL
    quick_place.start()
    wait_until(lambda: len(quick_place.lives()) == 2, "both are known")
    quick_place.settle()

"""Lives in the simulated fleet: any order of commands, crashes, duplicates and delays; one seed reproduces a run."""

import os
from collections.abc import Callable

import pytest

from actors.allocator import Turns
from actors.commands import Demand
from actors.driver import Exit
from actors.errors import DriverError
from actors.ports import Decision, NewFact
from actors.world import Call, tell
from events.coordinator import Stopped
from events.vm import Condemned
from infra.drivers.scripted import Script
from tests.simulation.harness import SCALERS, Simulation, refused

SEEDS = range(3000 if os.environ.get("FLEETLOG_SOAK") else 60)


def _scripts(simulation_seed: int) -> Callable[[str], Script]:
    def script(vm: str) -> Script:
        match (hash_of(vm) + simulation_seed) % 8:
            case 0:
                return Script(spawn_error=DriverError("missing", "no such binary", transient=False))
            case 1:
                return Script(spawn_error=DriverError("exhausted", "no memory", transient=True))
            case 2:
                return Script(exits=Exit(exit_code=1))
            case 3:
                return Script(teardown_failures=3)
            case _:
                return Script()

    return script


def hash_of(text: str) -> int:
    """Return a number of a text, the same in every process."""
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(text))


def _act(simulation: Simulation) -> None:
    """Let somebody do something."""
    chance = simulation.chance
    running = simulation.running() + sorted(simulation.cloud.running)
    local = simulation.running()
    known = sorted(simulation.world.router.vms)
    scaler = chance.choice(sorted(SCALERS))
    match chance.randrange(17):
        case 0 | 1 | 2:
            simulation.demand(scaler, count=chance.randint(1, 3))
        case 3:
            simulation.demand(scaler, job=f"job-{chance.randrange(5)}")
        case 4 | 5 if running:
            simulation.register(chance.choice(running))
        case 6 if running:
            simulation.register(chance.choice(running), session="somebody-else")
        case 7 if running:
            simulation.done(chance.choice(running))
        case 8 if local:
            simulation.host.end(chance.choice(local), exit_code=chance.choice([0, 1, -9]))
        case 9 if known:
            simulation.remove(chance.choice(known), force=chance.random() < 0.5)
        case 10:
            simulation.gate(scaler, chance.choice(["paused", "open", "open", "draining"]))
        case 11 if running:
            simulation.acked(chance.choice(running))
        case 12:
            simulation.journal.lose_next_ack(retries_fail=chance.random() < 0.5)
        case 13 if known:
            simulation.beat(chance.choice(known))
        case 14 | 15:
            simulation.cloud.work()
        case 16 if simulation.cloud.running:
            simulation.cloud.end(chance.choice(sorted(simulation.cloud.running)))
        case _:
            simulation.clock.elapsed_s += chance.choice([0.1, 5, 70])


@pytest.mark.parametrize("bugs", [False, True], ids=["crashes", "crashes-and-bugs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_with_crashes_loses_nothing_and_leaks_nothing(seed: int, *, bugs: bool) -> None:
    simulation = Simulation(seed, _scripts(seed))
    simulation.bugs = bugs
    chance = simulation.chance
    for _ in range(60):
        _act(simulation)
        if chance.random() < 0.1:
            simulation.points.left = chance.randint(1, 12)
        if bugs and chance.random() < 0.2:
            simulation.points.bugs_left = chance.randint(1, 6)
        if chance.random() < 0.05:
            simulation.journal.unavailable()
        for _ in range(chance.randrange(40)):
            simulation.step()
        simulation.journal.unavailable(down=False)
        if chance.random() < 0.05:
            simulation.crash()
        simulation.check_log()
        simulation.check_cloud()
    simulation.points.left = simulation.points.bugs_left = None
    simulation.advance(5)
    assert bugs or simulation.supervisor.restarts == 0, "an actor died of a bug of ours"
    simulation.check_actors()
    for scaler in SCALERS:
        simulation.gate(scaler, "paused")
    for _ in range(6):
        simulation.provision()
        simulation.advance(600)
    simulation.check_log()
    simulation.check_cloud()
    simulation.check_actors()
    simulation.check_nothing_left()


def test_one_life_from_demand_to_reaped() -> None:
    simulation = Simulation(1)
    answer = simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    assert [a.kind for a in answer[0]] == ["spawning"]
    assert answer[0][0].vm == vm
    registered = simulation.register(vm)
    simulation.settle()
    assert registered[0].vm == vm
    simulation.acked(vm)
    simulation.done(vm, exit_code=3)
    simulation.settle()
    assert simulation.running() == [vm], "an agent that said done is given a moment to leave by itself"
    simulation.host.end(vm, exit_code=3)
    simulation.settle()
    tags = [fact.tag for fact in simulation.journal.read(f"vm.{vm}")]
    assert tags == [
        "vm.requested",
        "vm.spawn_started",
        "vm.spawned",
        "vm.registered",
        "vm.config_acked",
        "vm.draining",
        "vm.reaped",
    ]
    simulation.check_nothing_left()


def test_the_same_job_asking_twice_gets_the_same_agent() -> None:
    simulation = Simulation(2)
    first = simulation.demand("small", job="build-7")
    simulation.settle()
    second = simulation.demand("small", job="build-7")
    simulation.settle()
    assert second[0][0].kind == "existing"
    assert second[0][0].vm == first[0][0].vm
    vm = first[0][0].vm
    simulation.register(vm)
    simulation.settle()
    simulation.done(vm)
    simulation.settle()
    third = simulation.demand("small", job="build-7")
    simulation.settle()
    assert third[0][0].kind == "spawning", "a job that asks again after its agent's life gets a new one"


def test_caps_are_never_overshot_and_name_themselves() -> None:
    simulation = Simulation(3)
    answer = simulation.demand("small", count=10)
    simulation.settle()
    assert [a.kind for a in answer[0]].count("spawning") == SCALERS["small"]
    refusal = answer[0][-1]
    assert (refusal.kind, refusal.cap) == ("at-capacity", "scaler-agents")
    assert "1 needed, 0 free of 3" in refusal.message
    rest = simulation.demand("large", count=5)
    simulation.settle()
    assert [a.kind for a in rest[0]].count("spawning") == 1
    assert rest[0][-1].cap == "global-agents"


def test_the_throttle_gives_turns_in_order_and_never_more_than_its_width() -> None:
    simulation = Simulation(4)
    simulation.demand("small", count=3)
    while simulation.pool.run_turn() or simulation.acknowledgements.run():
        pass  # everything but the spawns themselves
    started = [f.aggregate for f in simulation.journal.replay() if f.tag == "vm.spawn_started"]
    asked = [f.aggregate for f in simulation.journal.replay() if f.tag == "vm.requested"]
    assert started == asked[:2]
    assert len(simulation.spawns.steps) == 2
    simulation.settle()
    assert len(simulation.running()) == 3


def test_a_silent_agent_fails_after_the_grace_and_a_beating_one_does_not() -> None:
    simulation = Simulation(5)
    simulation.demand("small", count=2)
    simulation.settle()
    silent, beating = simulation.running()
    for vm in (silent, beating):
        simulation.register(vm)
    simulation.settle()
    for _ in range(30):
        simulation.beat(beating)
        simulation.advance(10)
    assert simulation.running() == [beating]
    facts = {f.tag: f.event for f in simulation.journal.read(f"vm.{silent}")}
    assert facts["vm.failed"].reason == "heartbeat-timeout"


def test_our_own_downtime_never_counts_as_an_agents_silence() -> None:
    simulation = Simulation(6)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    simulation.register(vm)
    simulation.settle()
    simulation.clock.elapsed_s += 10_000
    simulation.crash()
    simulation.advance(50)
    simulation.beat(vm)
    simulation.advance(20)
    assert simulation.running() == [vm]
    assert "vm.taken_up" in [f.tag for f in simulation.journal.read(f"vm.{vm}")]


def test_a_machine_nobody_registers_on_is_failed_at_its_deadline() -> None:
    simulation = Simulation(7)
    simulation.demand("small")
    simulation.advance(119)
    assert len(simulation.running()) == 1
    simulation.advance(2)
    simulation.check_nothing_left()


def test_a_missing_binary_backs_the_scaler_off_before_its_slot_is_freed() -> None:
    error = DriverError("missing", "no such binary: /opt/agent", transient=False)
    simulation = Simulation(8, lambda _: Script(spawn_error=error))
    simulation.demand("small")
    simulation.settle()
    again = simulation.demand("small")
    simulation.settle()
    assert again[0][0].kind == "skipped"
    assert "no such binary: /opt/agent" in again[0][0].message
    assert again[0][0].retry_after_s == pytest.approx(30)
    simulation.advance(31)
    third = simulation.demand("small")
    simulation.settle()
    assert third[0][0].kind == "spawning"


@pytest.mark.parametrize(
    ("before", "code"),
    [("nothing", "unknown-agent"), ("other-session", "already-registered"), ("reaped", "ended")],
)
def test_a_registration_that_must_not_be_is_refused(before: str, code: str) -> None:
    simulation = Simulation(9)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    if before == "nothing":
        with pytest.raises(Exception, match="was ever requested") as caught:
            simulation.fleet._explain_absence("a-unknown")
        assert getattr(caught.value, "code", None) == code
        return
    simulation.register(vm)
    simulation.settle()
    if before == "reaped":
        simulation.done(vm)
        simulation.advance(3)
        with pytest.raises(Exception, match="one life is over") as caught:
            simulation.fleet._explain_absence(vm)
        assert getattr(caught.value, "code", None) == code
        return
    answer = simulation.register(vm, session="somebody-else")
    simulation.settle()
    assert refused(answer) == code


def test_a_host_that_rebooted_has_lost_its_machines_and_says_so() -> None:
    simulation = Simulation(10)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    simulation.host.reboot()
    simulation.crash()
    simulation.settle()
    facts = {f.tag: f.event for f in simulation.journal.read(f"vm.{vm}")}
    assert facts["vm.failed"].reason == "host-rebooted"
    simulation.check_nothing_left()


def _condemn_elsewhere(simulation: Simulation, vm: str) -> None:
    """Append a verdict as another process would."""
    last = simulation.journal.read(f"vm.{vm}")[-1]
    verdict = NewFact(
        aggregate=f"vm.{vm}",
        version=last.version + 1,
        expected_sequence=last.sequence,
        event=Condemned(reason="operator", evidence="asked at another front door"),
    )
    decision = Decision(
        attempt="f" * 32,
        at=simulation.clock.now(),
        writer="c2",
        cause="operator:x",
        correlation="x",
        facts=(verdict,),
    )
    simulation.journal.append(decision, lambda _: None)


def test_a_verdict_another_process_appended_is_carried_out_by_who_has_the_duty() -> None:
    simulation = Simulation(12)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    _condemn_elsewhere(simulation, vm)
    simulation.world.router.foreign(simulation.journal.read(f"vm.{vm}")[-1])
    simulation.settle()
    simulation.check_nothing_left()
    assert simulation.journal.read(f"vm.{vm}")[-1].event.reason == "operator"


def test_a_verdict_is_carried_out_after_a_restart_too() -> None:
    simulation = Simulation(13)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    _condemn_elsewhere(simulation, vm)
    simulation.crash()
    simulation.settle()
    simulation.check_nothing_left()


def test_a_second_process_with_our_id_stops_the_first() -> None:
    simulation = Simulation(11)
    first, fatal = simulation.world, simulation.fatal
    old_pool, old_reads = simulation.pool, simulation.reads
    simulation.boot()
    routed = simulation.fleet.route(Demand(id="d" * 32, labels=("linux", "small")))
    assert first.router.allocator is not None
    tell(first.router.allocator, Call(routed))
    while old_pool.run_turn() or simulation.acknowledgements.run() or old_reads.run():
        pass
    assert fatal
    assert "another process" in fatal[0]
    assert not simulation.running()


def test_a_process_that_was_replaced_stops_at_once_and_leaves_no_fact_of_its_end() -> None:
    simulation = Simulation(12)
    first, fatal = simulation.supervisor, simulation.fatal
    simulation.boot()
    for fact in simulation.journal.replay():
        first.heed(fact)
    assert len(fatal) == 1
    assert "another process" in fatal[0]
    assert not simulation.fatal, "the second one is not told to stop by what it wrote itself"
    for fact in simulation.journal.replay():
        simulation.supervisor.heed(fact)
    assert not simulation.fatal
    first.stop("replaced")
    assert not [fact for fact in simulation.journal.replay() if isinstance(fact.event, Stopped)]


def test_two_processes_with_one_id_never_both_spawn_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "free", lambda *_: 0)  # it waits for its turn, as behind others
    simulation = Simulation(13)
    simulation.demand("large")
    while not simulation.world.router.vms:
        simulation.step()
    first, pool, spawns, reads = simulation.world, simulation.pool, simulation.spawns, simulation.reads
    assert not spawns.steps
    (vm,) = first.router.vms
    simulation.boot()
    simulation.settle()
    assert simulation.running() == [vm]
    # The first is still there, and its own scaler gives the machine its turn.
    while pool.run_turn() or simulation.acknowledgements.run() or reads.run():
        pass
    assert [fact.tag for fact in simulation.journal.read(f"vm.{vm}")].count("vm.spawn_started") == 1
    assert not spawns.steps

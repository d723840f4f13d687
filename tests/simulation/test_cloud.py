"""Cloud machines: their provisioner is told by the log alone, with each step of the life and never beside it."""

from typing import Any

import pytest

from actors.commands import ReportProvision, Verdict
from actors.silence import LET_IN_S
from events.backend import SlotTaken
from events.claim import ClaimRegistered
from events.envelope import Recorded
from events.scale import Down, Up
from events.vm import Reaped, Requested
from tests.simulation.cloud import TARGET
from tests.simulation.harness import SCALERS, Simulation, refused, slot_of

SLOT = slot_of("cloud")


def offered(simulation: Simulation) -> str:
    """Ask for one cloud machine; return its id once its provisioner was told."""
    simulation.demand("cloud")
    simulation.settle()
    (vm,) = [fact.event.agent for fact in told(simulation, Up)]
    return str(vm)


def told(simulation: Simulation, kind: type[Any]) -> list[Recorded]:
    return [fact for fact in simulation.journal.replay() if isinstance(fact.event, kind)]


def say(simulation: Simulation, vm: str, verdict: Verdict, target: str = TARGET, **more: Any) -> list[Any]:
    ref = simulation.world.router.vms.get(vm)
    answer = simulation.tell(ref, ReportProvision(vm=vm, target=target, verdict=verdict, **more))
    simulation.settle()
    return answer


def tags(simulation: Simulation, vm: str) -> list[str]:
    return [fact.tag.removeprefix("vm.") for fact in simulation.journal.read(f"vm.{vm}")]


def working(simulation: Simulation) -> str:
    vm = offered(simulation)
    say(simulation, vm, "accepted", reference="i-0123")
    simulation.register(vm)
    simulation.settle()
    simulation.acked(vm)
    simulation.settle()
    return vm


def test_a_life_and_what_its_provisioner_is_told_are_stored_together() -> None:
    simulation = Simulation(1)
    vm = working(simulation)
    simulation.done(vm)
    simulation.settle()
    (up,), (down,) = told(simulation, Up), told(simulation, Down)
    facts = {fact.tag: fact for fact in simulation.journal.read(f"vm.{vm}")}
    assert up.attempt == facts["vm.spawn_started"].attempt == facts["vm.requested"].attempt, "one batch"
    assert down.attempt == facts["vm.draining"].attempt, "one batch"
    assert (down.event.reason, down.event.offer, down.event.reference) == ("job-complete", 1, "i-0123")
    assert (up.event.request_id, down.event.request_id) == (f"{vm}.up", f"{vm}.down")
    assert say(simulation, vm, "terminated", detail="deleted") == [None]
    assert tags(simulation, vm)[-2:] == ["draining", "reaped"]
    assert simulation.journal.read(f"vm.{vm}")[-1].event.evidence == f"{TARGET}: deleted"
    simulation.check_actors()
    simulation.check_nothing_left()


def test_the_code_is_in_the_offer_and_only_its_hash_anywhere_else() -> None:
    simulation = Simulation(2)
    vm = offered(simulation)
    (up,), (claim,) = told(simulation, Up), told(simulation, ClaimRegistered)
    assert len(up.event.claim_code) == 64
    assert up.event.claim_code not in claim.aggregate
    assert (claim.event.vm, claim.event.expires_at) == (vm, up.event.claim_expires_at)
    others = [repr(fact) for fact in simulation.journal.replay() if not isinstance(fact.event, Up)]
    assert not [text for text in others if up.event.claim_code in text]


def test_an_unanswered_start_fails_and_its_end_is_offered_until_it_is_confirmed() -> None:
    simulation = Simulation(3)
    vm = offered(simulation)
    simulation.advance(59)
    assert tags(simulation, vm)[-1] == "spawn_started"
    simulation.advance(2)
    assert simulation.journal.read(f"vm.{vm}")[-1].event.reason == "spawn-timeout"
    for offer in (1, 2, 3):
        assert [fact.event.offer for fact in told(simulation, Down)] == list(range(1, offer + 1))
        simulation.advance(601)
    assert tags(simulation, vm).count("teardown_failed") == 3
    assert len({fact.event.request_id for fact in told(simulation, Down)}) == 1
    say(simulation, vm, "terminated")
    simulation.check_nothing_left()
    simulation.advance(3600)
    assert len(told(simulation, Down)) == 4, "what is over is offered no more"


@pytest.mark.parametrize("crash_after_s", [1, 599])
def test_a_restart_offers_an_end_again_when_it_is_due_and_not_before(crash_after_s: int) -> None:
    simulation = Simulation(4)
    vm = working(simulation)
    simulation.done(vm)
    simulation.settle()
    simulation.clock.elapsed_s += crash_after_s
    simulation.crash()
    simulation.settle()
    assert len(told(simulation, Down)) == 1
    simulation.advance(601 - crash_after_s)
    assert [fact.event.offer for fact in told(simulation, Down)] == [1, 2]


def test_a_restart_disturbs_no_phase_and_repeats_no_offer() -> None:
    simulation = Simulation(5)
    vm = offered(simulation)
    for step in (
        lambda: say(simulation, vm, "accepted"),
        lambda: simulation.register(vm),
        lambda: simulation.acked(vm),
    ):
        before = tags(simulation, vm)
        simulation.crash()
        simulation.settle()
        assert tags(simulation, vm) == before
        step()
        simulation.settle()
    simulation.crash()
    simulation.advance(50)
    simulation.beat(vm)
    simulation.advance(50)
    assert tags(simulation, vm)[-1] == "config_acked"
    assert len(told(simulation, Up)) == 1
    assert not told(simulation, Down)


def test_an_agent_that_comes_before_its_provisioners_word_is_let_in() -> None:
    simulation = Simulation(6)
    vm = offered(simulation)
    registration = simulation.register(vm)
    simulation.settle()
    assert registration[0].vm == vm
    assert tags(simulation, vm) == ["requested", "spawn_started", "spawned", "registered"]
    assert say(simulation, vm, "accepted") == [None]
    assert tags(simulation, vm)[-1] == "registered"


def test_what_no_provisioner_was_asked_for_needs_no_word_of_one() -> None:
    simulation = Simulation(7)
    simulation.demand("cloud", count=2)
    simulation.settle()
    (up,) = told(simulation, Up)
    (waiting,) = simulation.world.router.vms.keys() - {up.event.agent}
    simulation.remove(waiting, force=True)
    simulation.settle()
    assert tags(simulation, waiting) == ["requested", "condemned", "draining", "reaped"]
    assert not told(simulation, Down)


def test_a_provisioner_that_fails_backs_the_scaler_off_and_is_told_to_clean_up() -> None:
    simulation = Simulation(8)
    vm = offered(simulation)
    say(simulation, vm, "failed", detail="no quota", permanent=True)
    failed = simulation.journal.read(f"vm.{vm}")[-1].event
    assert (failed.reason, failed.detail) == ("launch-refused", f"{TARGET}: no quota")
    assert len(told(simulation, Down)) == 1
    answer = simulation.demand("cloud")
    simulation.settle()
    assert answer[0][0].kind == "skipped"


def test_a_machine_its_provider_took_away_is_reaped_at_once() -> None:
    simulation = Simulation(9)
    vm = working(simulation)
    say(simulation, vm, "terminated", detail="spot instance reclaimed")
    assert tags(simulation, vm)[-2:] == ["failed", "reaped"]
    assert not told(simulation, Down), "its provisioner knows"


@pytest.mark.parametrize("verdict", ["accepted", "failed", "terminated"])
def test_who_was_not_asked_has_no_say(verdict: Verdict) -> None:
    simulation = Simulation(10)
    vm = offered(simulation)
    before = tags(simulation, vm)
    assert refused(say(simulation, vm, verdict, target="somebody-else")) == "not-yours"
    assert tags(simulation, vm) == before


def test_an_agent_that_may_not_know_yet_that_it_is_in_is_given_time_to_ask_again() -> None:
    simulation = Simulation(11, grace_s=3)
    vm = offered(simulation)
    simulation.register(vm)
    simulation.settle()
    simulation.crash()
    simulation.advance(LET_IN_S - 1)
    assert tags(simulation, vm)[-1] == "registered"
    simulation.advance(60)
    assert "failed" in tags(simulation, vm)


def test_slots_are_the_clusters() -> None:
    """Another coordinator takes one slot of the scaler and frees it again; ours hears of it by the log alone."""
    simulation = Simulation(12)
    most = SCALERS["cloud"]
    for number in range(most):
        _taken_elsewhere(simulation, f"b-{number}")
    answer = simulation.demand("cloud")
    simulation.settle()
    assert (answer[0][0].kind, answer[0][0].cap) == ("at-capacity", "scaler-agents")
    _follow(simulation)
    simulation.append("vm.b-0", Reaped(reason="operator", slot=SLOT, evidence="gone"))
    _follow(simulation)
    answer = simulation.demand("cloud")
    simulation.settle()
    assert answer[0][0].kind == "spawning"


def _taken_elsewhere(simulation: Simulation, vm: str) -> None:
    requested = Requested(
        scaler="cloud",
        backend="event",
        slot=SLOT,
        owner="c2",
        host="h2",
        boot_id="boot-2",
        labels=("cloud", "linux"),
        targets=(TARGET,),
    )
    simulation.append(SLOT, SlotTaken(vm=vm))
    simulation.append(f"vm.{vm}", requested)


def _follow(simulation: Simulation) -> None:
    """Let the coordinator hear of all that others wrote, as its follow of the log does."""
    for fact in simulation.journal.replay():
        if fact.writer == "c2":
            simulation.world.router.foreign(fact)
    simulation.settle()

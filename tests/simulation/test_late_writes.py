"""A write its writer gave up on can still arrive: it must count once, and nothing may be done twice for it."""

from collections.abc import Callable

from actors.ports import Decision, NotAppended, Outcome
from tests.simulation.harness import Simulation


def _hold_back_next(simulation: Simulation) -> None:
    """Let the next append go unanswered, and arrive just before the one after it."""
    journal = simulation.journal
    append = journal.append
    held: list[Decision] = []

    def late(decision: Decision, done: Callable[[Outcome], None]) -> None:
        if not held:
            held.append(decision)
            unknown = NotAppended(code="unavailable", detail="no acknowledgement", stored=None)
            simulation.acknowledgements.submit(lambda: done(unknown))
            return
        journal.append = append  # type: ignore[method-assign]
        append(held[0], lambda _: None)
        append(decision, done)

    journal.append = late  # type: ignore[method-assign]


def test_a_demand_whose_write_arrives_late_gets_one_machine() -> None:
    simulation = Simulation(21)
    _hold_back_next(simulation)
    answer = simulation.demand("small")
    simulation.settle()
    requested = [fact for fact in simulation.journal.replay() if fact.tag == "vm.requested"]
    assert [f"vm.{each.vm}" for each in answer[0]] == [fact.aggregate for fact in requested]
    assert len(simulation.running()) == 1
    simulation.check_log()
    simulation.check_actors()


def test_a_machine_whose_step_arrives_late_takes_it_once() -> None:
    simulation = Simulation(22)
    simulation.demand("small")
    simulation.settle()
    (vm,) = simulation.running()
    _hold_back_next(simulation)
    registered = simulation.register(vm)
    simulation.settle()
    assert registered[0].vm == vm
    tags = [fact.tag for fact in simulation.journal.read(f"vm.{vm}")]
    assert tags.count("vm.registered") == 1
    simulation.check_actors()

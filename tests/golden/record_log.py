"""Records a log and the state it folds to: `python -m tests.golden.record_log NAME`. It never overwrites one.

Record a new one when lives have become different, beside the older ones: those must fold for ever.
"""

import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from actors.commands import ReportProvision, Verdict
from events.allocator import AddressLeased
from events.claim import ClaimRedeemed
from events.codec import recorded_as_form
from events.envelope import Recorded
from events.vm import TeardownConfirmed, VmEvent
from infra.drivers.scripted import Script
from projections.boot import fold_fleet
from projections.catalogue import FLEET
from projections.view import RowSet
from projections.vm import VmState, evolve
from tests.fleet_log import Story
from tests.golden.record import LOGS
from tests.simulation.cloud import TARGET
from tests.simulation.harness import Simulation


def end_state(facts: Iterable[Recorded]) -> dict[str, Any]:
    """Return all that a log adds up to: the live fleet, every life, and the rows of the fleet's tables."""
    facts = tuple(facts)
    machines: dict[str, VmState] = {}
    rows = RowSet(lambda _table, _keys: {})
    for fact in facts:
        if isinstance(fact.event, VmEvent):
            vm = fact.aggregate.removeprefix("vm.")
            machines[vm] = evolve(machines.get(vm), fact.event, fact)
        FLEET.apply(rows, fact)
    tables = {
        table.name: {str(key): row for key, row in changed.items()}
        for table, changed in rows.changes().items()
    }
    state = {"fleet": fold_fleet(facts), "machines": machines, "tables": tables}
    # Sets have no order of their own; a recorded file has. Persistent maps are written as dicts.
    encoded = msgspec.json.encode(state, enc_hook=dict, order="deterministic")
    decoded: dict[str, Any] = msgspec.json.decode(encoded)
    return decoded


def lived() -> list[Recorded]:
    """Let real actors live a few lives on a scripted host: done, failed, removed, crashed through, still running."""
    simulation = Simulation(11, lambda vm: Script(teardown_failures=1 if "-00003-" in vm else 0))
    simulation.demand("small", count=3, job=None)
    simulation.demand("large", job="job-1")
    simulation.advance(1)
    first, second, third, _fourth = simulation.running()
    for vm in (first, second):
        simulation.register(vm)
        simulation.settle()
        simulation.acked(vm)
    simulation.advance(2)
    simulation.done(first)
    simulation.advance(2)
    simulation.crash()
    simulation.advance(3)
    simulation.host.end(second, exit_code=-9)
    simulation.remove(third, force=True)
    simulation.gate("large", "draining")
    simulation.advance(30)
    simulation.gate("large", "open")
    simulation.gate("small", "paused")
    simulation.settle()
    simulation.demand("large", job="job-2")
    simulation.advance(1)
    simulation.supervisor.stop("upgrade")
    simulation.settle()
    simulation.crash()
    simulation.advance(1)
    return list(simulation.journal.replay())


def told() -> list[Recorded]:
    """Tell lives in which every kind of fact occurs, the rare ones too; some are still going on at the end."""
    return Story(2151).run(110).facts


def leased() -> list[Recorded]:
    """Tell of machines with addresses: one that is reaped, whose address another one gets, and one that lives on."""
    story = Story(5)
    network = "allocator.alpha-host.default"
    first = story.begin(straight=True)
    story.decide((network, AddressLeased(vm=first, address="10.0.0.2")))
    second = story.begin(straight=True)
    story.decide((network, AddressLeased(vm=second, address="10.0.0.3")))
    story.finish(second, steps=2)
    story.finish(first)
    third = story.begin(straight=True)
    story.decide((network, AddressLeased(vm=third, address="10.0.0.2")))
    story.finish(third, steps=3)
    return story.facts


def clouds() -> list[Recorded]:
    """Let cloud machines live: one to its end, one that nobody starts, one of two targets, one that lives on."""
    simulation = Simulation(21)
    done, silent = (_offered(simulation) for _ in range(2))
    _say(simulation, done, "accepted")
    (claim,) = [f for f in simulation.journal.replay() if f.tag == "claim.registered" and f.event.vm == done]
    spent = ClaimRedeemed(vm=done, public_key="U" + "A" * 55)
    simulation.append(claim.aggregate, spent)
    simulation.register(done)
    simulation.settle()
    simulation.acked(done)
    simulation.done(done)
    simulation.settle()
    _say(simulation, done, "terminated")
    simulation.advance(700)
    _say(simulation, silent, "terminated")
    simulation.advance(60)
    confirmed = _offered(simulation)
    simulation.remove(confirmed, force=True)
    simulation.settle()
    simulation.append(f"vm.{confirmed}", TeardownConfirmed(target="acme-2", evidence="acme-2: deleted"))
    simulation.settle()
    _offered(simulation)
    return list(simulation.journal.replay())


def _offered(simulation: Simulation) -> str:
    answer = simulation.demand("cloud")
    simulation.settle()
    vm: str = answer[0][0].vm
    return vm


def _say(simulation: Simulation, vm: str, verdict: Verdict) -> None:
    command = ReportProvision(vm=vm, target=TARGET, verdict=verdict)
    simulation.tell(simulation.world.router.vms.get(vm), command)
    simulation.settle()


KINDS = {"clouds": clouds, "lived": lived, "told": told, "leased": leased}


def main() -> None:
    """Write one log and its end state."""
    if len(sys.argv) != 3 or sys.argv[2] not in KINDS:
        sys.exit(f"usage: python -m tests.golden.record_log NAME {'|'.join(KINDS)}")
    name, facts = sys.argv[1], KINDS[sys.argv[2]]()
    LOGS.mkdir(exist_ok=True)
    with (LOGS / f"{name}.jsonl").open("xb") as log, (LOGS / f"{name}.state.json").open("xb") as state:
        log.writelines(recorded_as_form(fact) + b"\n" for fact in facts)
        state.write(msgspec.json.format(msgspec.json.encode(end_state(facts)), indent=1) + b"\n")
    print(f"recorded {len(facts)} facts")


if __name__ == "__main__":
    main()

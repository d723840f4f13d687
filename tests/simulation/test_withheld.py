"""Addresses under a sweep's hands: given to nobody meanwhile, and what is being decided counts as held."""

from __future__ import annotations

from typing import Any

from actors.allocator import Leases
from actors.world import Call
from tests.simulation.harness import OCCUPIED, POOL, Simulation


def addresses(simulation: Simulation) -> set[str]:
    return {state.address for state in simulation.fold().vms.values() if state.address}


def held(simulation: Simulation) -> list[Any]:
    """Ask the allocator which addresses are held; the answer comes when it gets to it."""
    answer: list[Any] = []
    allocator = simulation.world.router.allocator
    assert allocator is not None
    allocator.tell(Call(Leases(), reply=answer.append))
    return answer


def test_an_address_that_is_being_cleared_is_given_to_nobody() -> None:
    simulation = Simulation(1)
    taken = OCCUPIED | {POOL.gateway}
    withheld = [str(host) for host in POOL.network.hosts() if str(host) not in taken][:2]
    simulation.world.router.withheld = frozenset(withheld)
    simulation.demand("small", 2)
    simulation.settle()
    assert len(addresses(simulation)) == 2
    assert not addresses(simulation) & {*withheld, *taken}
    simulation.world.router.withheld = frozenset()
    simulation.demand("small")
    simulation.settle()
    assert withheld[0] in addresses(simulation)


def test_an_address_whose_lease_is_on_its_way_to_the_log_counts_as_held() -> None:
    simulation = Simulation(2)
    simulation.demand("small")
    asked = held(simulation)  # right behind the demand, whose facts are not in the log yet
    simulation.settle()
    assert asked == [frozenset(addresses(simulation))]
    assert len(addresses(simulation)) == 1

"""The coordinator is killed at every named point in the middle of a microVM's start and teardown, and started again.

Each time: nothing is left of it, or it is taken up again; never two machines for one request.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from projections.vm import VmState
from tests.acceptance.microvm_place import KINDS, MicrovmPlace
from tests.network_site import network_site

# Where it dies -> with which reason the life ends. It dies in the life of a guest with a short job.
POINTS = {
    "firecracker.spawn.directory": "launch-failed",
    "firecracker.spawn.filled": "launch-failed",
    "firecracker.spawn.network": "launch-failed",
    "firecracker.spawn.started": "launch-failed",
    "firecracker.spawn.api": "launch-failed",
    "firecracker.spawn.configured": "launch-failed",
    "firecracker.spawn.running": "job-complete",
    "firecracker.destroy.ended": "job-complete",
    "firecracker.destroy.network": "job-complete",
}
AT_ONCE = 3


@pytest.fixture(scope="module")
def killed_lives(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[VmState]]]:
    """Every life that is asked for, a few at a time: most of one is waiting for servers to start."""
    wanted = [
        str(item.callspec.params["point"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == KILLED_TEST
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {point: pool.submit(killed_life, point) for point in wanted}
        pool.shutdown(cancel_futures=True)


def killed_life(point: str) -> VmState:
    with network_site() as site:
        place = MicrovmPlace(site, kinds={"quick": KINDS["quick"]})
        try:
            first = place.start(crash_at=point)
            with place.asking("demand", "--labels", "quick"):  # it may die before it has answered
                assert first.wait_dead() == -signal.SIGKILL
            place.start()
            place.wait_all_reaped()
            (state,) = place.lives().values()
            place.settle()
            return state
        finally:
            place.clean()


@pytest.mark.parametrize(("point", "reason"), POINTS.items())
def test_killed_in_a_life_of_a_microvm_the_next_coordinator_leaves_nothing_of_it(
    killed_lives: dict[str, Future[VmState]], point: str, reason: str
) -> None:
    state = killed_lives[point].result()
    assert state.reason == reason
    assert state.exit_code == (0 if reason == "job-complete" else None)


KILLED_TEST = test_killed_in_a_life_of_a_microvm_the_next_coordinator_leaves_nothing_of_it.__name__

"""A silent agent is failed after its grace; time in which the coordinator itself could hear nobody never counts."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

from tests.acceptance.host import wait_until
from tests.acceptance.place import Place

GRACE_S = 3.0
LONGER_THAN_GRACE_S = GRACE_S + 1.5


def agent_pid(place: Place, vm: str) -> int:
    handle = place.lives()[vm].handle
    assert handle is not None
    pid: int = handle.data["pid"]
    return pid


def let_pass(seconds: float) -> None:
    """Let time pass for others. What is tested here is time itself, so there is no condition to wait for."""
    ends = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= ends, "time passes", seconds + 5)


def test_a_stopped_agent_is_failed_after_the_grace_and_one_that_is_heard_of_again_is_not(
    quick_place: Place,
) -> None:
    place = quick_place
    place.start()
    silent, beating, halting = (place.demand("held") for _ in range(3))
    for vm in (silent, beating, halting):
        place.wait_phase(vm, "registered")
    os.kill(agent_pid(place, silent), signal.SIGSTOP)
    for _ in range(3):  # together longer than the grace, and each time heard of again
        os.kill(agent_pid(place, halting), signal.SIGSTOP)
        let_pass(GRACE_S / 2)
        os.kill(agent_pid(place, halting), signal.SIGCONT)
        let_pass(1.2)
    place.wait_phase(silent, "reaped")
    state = place.lives()[silent]
    assert state.reason == "heartbeat-timeout"
    failed = next(
        fact for fact in place.facts() if fact.aggregate == f"vm.{silent}" and fact.tag == "vm.failed"
    )
    assert state.registered_at is not None
    assert failed.at - state.registered_at >= timedelta(seconds=GRACE_S)
    assert {place.lives()[vm].phase for vm in (beating, halting)} == {"registered"}
    place.open_gate()
    place.wait_all_reaped()
    assert {place.lives()[vm].reason for vm in (beating, halting)} == {"job-complete"}
    place.settle()


def test_a_coordinator_that_stood_still_longer_than_the_grace_fails_nobody_who_beats(
    quick_place: Place,
) -> None:
    place = quick_place
    coordinator = place.start()
    beating, silent = place.demand("held"), place.demand("held")
    for vm in (beating, silent):
        place.wait_phase(vm, "registered")
    os.kill(coordinator.pid, signal.SIGSTOP)
    os.kill(agent_pid(place, silent), signal.SIGSTOP)
    let_pass(LONGER_THAN_GRACE_S)
    os.kill(coordinator.pid, signal.SIGCONT)
    place.wait_phase(silent, "reaped")  # it does look again, and finds who is silent now
    assert place.lives()[silent].reason == "heartbeat-timeout"
    assert place.lives()[beating].phase == "registered"
    place.open_gate()
    place.wait_all_reaped()
    assert place.lives()[beating].reason == "job-complete"
    place.settle()


def test_a_coordinator_that_was_away_longer_than_the_grace_starts_the_grace_anew(quick_place: Place) -> None:
    place = quick_place
    first = place.start()
    beating, silent = place.demand("held"), place.demand("held")
    for vm in (beating, silent):
        place.wait_phase(vm, "registered")
    first.kill()
    os.kill(agent_pid(place, silent), signal.SIGSTOP)
    let_pass(LONGER_THAN_GRACE_S)
    place.start()
    up_at = place.facts()[-1].at
    place.wait_phase(silent, "reaped")
    failed = next(
        fact for fact in place.facts() if fact.aggregate == f"vm.{silent}" and fact.tag == "vm.failed"
    )
    assert failed.at - up_at >= timedelta(seconds=GRACE_S - 0.5), "our absence was not its silence"
    assert place.lives()[silent].reason == "heartbeat-timeout"
    assert place.lives()[beating].phase == "registered"
    place.open_gate()
    place.wait_all_reaped()
    assert place.lives()[beating].reason == "job-complete"
    place.settle()

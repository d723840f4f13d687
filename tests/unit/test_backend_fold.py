"""One scaler's fold: who counts as starting or registered, and which failures count, each once."""

from collections.abc import Sequence

import pytest

from events.backend import SlotTaken
from events.envelope import Resources
from events.vm import (
    Draining,
    Failed,
    Reaped,
    Reason,
    Registered,
    Spawned,
    SpawnStarted,
    VmEvent,
)
from projections.backend import LAUNCH_FAILURES, BackendState, Slot, evolve, evolve_vm
from projections.vm import BrokenLog
from tests.given import HANDLE, HISTORIES, SLOT, VM, recorded

NEED = Resources(cpus=1, memory_bytes=1 << 30)


def taken(*vms: str) -> BackendState:
    """Return a scaler with these slots taken."""
    state = BackendState()
    for version, vm in enumerate(vms, 1):
        event = SlotTaken(vm=vm, requests=NEED)
        state = evolve(state, event, recorded(event, version, aggregate=SLOT))
    return state


def told(state: BackendState, events: Sequence[VmEvent], vm: str = VM) -> BackendState:
    """Tell the scaler of a machine's facts, from its first on."""
    for version, event in enumerate(events, 1):
        state = evolve_vm(state, event, recorded(event, version, aggregate=f"vm.{vm}"))
    return state


def failed(reason: Reason) -> tuple[VmEvent, ...]:
    """Return a life that ended before its agent came."""
    return (*HISTORIES["starting"], Failed(reason=reason, detail=f"because of {reason}"))


def flags(slot: Slot) -> tuple[bool, bool, bool]:
    return slot.starting, slot.registered, slot.ended


def test_a_slot_follows_its_machine_and_is_free_only_when_nothing_is_left() -> None:
    state, steps = taken(VM), []
    for event in (
        SpawnStarted(),
        Spawned(handle=HANDLE),
        Registered(session="s"),
        Draining(reason="job-complete"),
    ):
        state = told(state, (event,))
        steps.append(flags(state.slots[VM]))
    assert steps == [(True, False, False), (False, False, False), (False, True, False), (False, True, True)]
    assert (state.cpus, state.memory_bytes) == (1, 1 << 30)
    state = told(state, (Reaped(reason="job-complete", slot=SLOT, evidence="nothing left"),))
    assert (dict(state.slots), state.cpus, state.memory_bytes) == ({}, 0, 0)


@pytest.mark.parametrize("reason", sorted(LAUNCH_FAILURES))
def test_a_launch_that_gave_no_agent_counts_and_says_why(reason: Reason) -> None:
    state = told(taken(VM), failed(reason))
    assert (state.failures, state.last_failure) == (1, f"because of {reason}")
    assert state.failed_at is not None


@pytest.mark.parametrize("reason", ["exited", "heartbeat-timeout", "host-rebooted", "supervision"])
def test_the_end_of_a_machine_that_gave_an_agent_counts_against_nobody(reason: Reason) -> None:
    state = told(taken(VM), (*HISTORIES["registered"], Failed(reason=reason, detail="")))
    assert (state.failures, state.failed_at) == (0, None)
    assert flags(state.slots[VM]) == (False, True, True)


def test_a_failure_that_is_told_again_counts_once() -> None:
    """A restarted actor tells its whole life once more; counted twice it would double the backoff."""
    state = told(told(taken(VM), failed("launch-failed")), failed("launch-failed"))
    assert state.failures == 1


def test_failures_in_a_row_add_up_and_any_registration_clears_them() -> None:
    state = taken("a-1", "a-2", "a-3")
    state = told(told(state, failed("launch-failed"), "a-1"), failed("spawn-timeout"), "a-2")
    assert state.failures == 2
    state = told(state, HISTORIES["registered"], "a-3")
    assert (state.failures, state.failed_at, state.last_failure) == (0, None, "")


def test_facts_of_machines_that_hold_no_slot_here_change_nothing() -> None:
    state = taken(VM)
    assert told(state, failed("launch-failed"), "a-stranger") == state


def test_a_version_that_is_not_the_next_is_a_broken_log() -> None:
    event = SlotTaken(vm="a-2")
    with pytest.raises(BrokenLog, match="follows version 1"):
        evolve(taken(VM), event, recorded(event, 3, aggregate=SLOT))


def test_a_state_stays_as_it_was_when_the_next_one_is_made_of_it() -> None:
    one = taken(VM, "vm-2")
    other = told(one, (SpawnStarted(),))
    gone = told(other, (Reaped(reason="exited", slot=SLOT, evidence="looked"),))
    assert [flags(state.slots[VM]) for state in (one, other)] == [(False,) * 3, (True, False, False)]
    assert [set(state.slots) for state in (one, other, gone)] == [{VM, "vm-2"}, {VM, "vm-2"}, {"vm-2"}]


def test_slots_may_be_given_as_a_dict_and_are_equal_to_the_folded_ones() -> None:
    folded = taken(VM)
    given = BackendState(version=1, sequence=folded.sequence, slots=dict(folded.slots))
    assert given == folded
    assert told(given, (SpawnStarted(),)) == told(folded, (SpawnStarted(),))

"""Guests that do not do as they should, under a real coordinator: each ends with the right fact, and leaves nothing.

All of them misbehave at once, on one coordinator, beside a machine that works and goes on working.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import psutil
import pytest

from events.vm import Reaped
from projections.vm import VmState
from tests.acceptance.host import wait_until
from tests.acceptance.microvm_place import KINDS, MicrovmPlace
from tests.network_site import network_site

GRACE_S = 1.0
FLOOD_MIB = 160
MOST_GROWTH_BYTES = 32 << 20
"""Of a coordinator that is flooded."""

MOST_ON_DISK_BYTES = 64 << 20

STEPS = {
    "held": KINDS["held"],
    "panic": "sleep 100; panic",
    "hang": "sleep 100; hang",
    "flood": "flood 150000; flood 150000 lines",
    "mute": "never-register; wait",
    "deaf": "never-register; ignore-ctrl-alt-del; wait",
    "early": "exit-early",  # the last: its scaler backs off once it has ended
}


class Misbehaved:
    """One coordinator, and the machine of each kind."""

    def __init__(self, place: MicrovmPlace) -> None:
        self.place = place
        self.coordinator = place.start("--agent-lines")
        (self.held,) = place.ask_for("held")
        place.wait_phase(self.held, "registered")
        self.resident_bytes = self.memory_bytes()
        self.vms = {kind: place.ask_for(kind)[0] for kind in STEPS if kind != "held"}

    def memory_bytes(self) -> int:
        """Return what the coordinator has in memory."""
        return int(psutil.Process(self.coordinator.pid).memory_info().rss)

    def end_of(self, kind: str, timeout_s: float = 30) -> tuple[VmState, str]:
        """Return how the machine of this kind ended, and with what evidence it was reaped."""
        vm = self.vms[kind]
        self.place.wait_phase(vm, "reaped", timeout_s)
        (reaped,) = [
            fact.event
            for fact in self.place.facts()
            if fact.aggregate == f"vm.{vm}" and isinstance(fact.event, Reaped)
        ]
        assert vm not in self.place.chroots()
        return self.place.lives()[vm], reaped.evidence


@pytest.fixture(scope="module")
def all_at_once() -> Iterator[Misbehaved]:
    with network_site() as site:
        place = MicrovmPlace(site, kinds=STEPS, register_timeout_s=5, stop_grace_s=GRACE_S)
        try:
            made = Misbehaved(place)
            yield made
            lives = place.lives()
            assert lives[made.held].phase == "registered", "who did as it should is not touched by any of it"
            assert lives[made.held].taken_up == 0
            place.tell(made.held, "exit 0")
            place.settle()
        finally:
            place.clean()


def test_a_guest_that_panics_is_known_to_have_ended(all_at_once: Misbehaved) -> None:
    state, _ = all_at_once.end_of("panic")
    assert state.reason == "exited", "its agent was in and had not said done"


def test_a_guest_that_leaves_before_it_registers_exited_early(all_at_once: Misbehaved) -> None:
    state, _ = all_at_once.end_of("early")
    assert (state.reason, state.registered_at) == ("exited-early", None)
    assert state.exit_code == 0


def test_a_guest_that_never_registers_is_given_up_in_time(all_at_once: Misbehaved) -> None:
    state, evidence = all_at_once.end_of("mute")
    assert (state.reason, state.registered_at) == ("register-timeout", None)
    assert state.spawned_at is not None
    assert state.ended_at is not None
    assert 4.5 < (state.ended_at - state.spawned_at).total_seconds() < 8
    assert "Ctrl-Alt-Del" in evidence


def test_a_guest_that_hangs_is_missed_and_killed(all_at_once: Misbehaved) -> None:
    state, evidence = all_at_once.end_of("hang")
    assert state.reason == "heartbeat-timeout"
    assert "killed after" in evidence, "it is deaf to Ctrl-Alt-Del as well"


def test_a_guest_that_ignores_ctrl_alt_del_is_killed_after_the_grace(all_at_once: Misbehaved) -> None:
    state, evidence = all_at_once.end_of("deaf")
    assert state.reason == "register-timeout"
    assert state.ended_at is not None
    assert state.reaped_at is not None
    assert (state.reaped_at - state.ended_at).total_seconds() >= GRACE_S
    assert "killed after" in evidence


def test_a_guest_that_floods_its_console_does_its_work_and_ends_well(all_at_once: Misbehaved) -> None:
    state, _ = all_at_once.end_of("flood")
    assert (state.reason, state.exit_code) == ("job-complete", 0)
    assert "guest: off" in all_at_once.place.console(state.id), "the end of it is kept"


def test_a_console_flooded_by_a_fast_guest_takes_neither_memory_nor_disk(all_at_once: Misbehaved) -> None:
    """The guest writes 100 kB/s where each of its instructions is emulated; here the test writes for it."""
    place, vm = all_at_once.place, all_at_once.held
    serial = place.base / "firecracker" / vm / "serial.log"
    block = b"x" * (1 << 20)
    most = 0
    with serial.open("ab") as console:
        for number in range(FLOOD_MIB):
            console.write(block if number < FLOOD_MIB // 2 else block[:-1] + b"\n")
            most = max(most, all_at_once.memory_bytes())

    def bounded() -> bool:
        nonlocal most
        most = max(most, all_at_once.memory_bytes())
        return serial.stat().st_blocks * 512 <= MOST_ON_DISK_BYTES

    wait_until(bounded, "the disk has most of it back")
    assert most - all_at_once.resident_bytes < MOST_GROWTH_BYTES
    assert len(json.dumps(place.ask("agent", "logs", vm))) < 4 << 20

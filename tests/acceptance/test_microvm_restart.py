"""`kill -9` of a coordinator with real microVMs in every state, of its NATS, and its long absence: what the next one finds."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest

from infra.network.namespace import entered
from projections.vm import VmState
from tests.acceptance.host import wait_until
from tests.acceptance.microvm_place import KINDS, MicrovmPlace
from tests.acceptance.test_servers import kill_server, server_pid
from tests.acceptance.test_silence import let_pass
from tests.conftest import wall_time
from tests.network_site import network_site

GRACE_S = 3.0
KINDS_HERE = {
    "held": KINDS["held"],
    "mute": KINDS["mute"],
    "deaf": "ignore-ctrl-alt-del; never-register; wait",
}
BURST = 12


@pytest.fixture
def place() -> Iterator[MicrovmPlace]:
    with network_site() as site:
        made = MicrovmPlace(
            site,
            tables=True,
            kinds=KINDS_HERE,
            max_concurrent_spawns=4,
            heartbeat_grace_s=GRACE_S,
            register_timeout_s=12,
            stop_grace_s=2,
        )
        try:
            yield made
        finally:
            made.clean()


def end_all(place: MicrovmPlace) -> None:
    """Have every job end well."""
    for vm, state in place.lives().items():
        if state.phase == "registered":
            place.tell(vm, "exit 0")
    place.wait_all_reaped(40)


def pid_of(state: VmState) -> int:
    assert state.handle is not None
    return int(state.handle.data["pid"])


def test_machines_in_every_state_are_taken_up_again_finished_or_torn_down(place: MicrovmPlace) -> None:
    first = place.start(crash_at="firecracker.spawn.configured#8")
    held = place.ask_for("held", 2)
    place.wait_phases(held, "registered")
    (mute,) = place.ask_for("mute")
    (deaf,) = place.ask_for("deaf")
    place.wait_phases((mute, deaf), "spawned")
    place.ask("agent", "rm", deaf, "--force")
    place.wait_phase(deaf, "draining")  # for its grace, in which it ignores Ctrl-Alt-Del
    before = place.lives()
    burst = place.ask_for("held", BURST)
    assert first.wait_dead() == -signal.SIGKILL
    for vm in (*held, mute, deaf):
        assert place.microvms()[pid_of(before[vm])] == vm, "a killed coordinator takes no machine with it"
    policies = place.policies()

    place.start()
    lives = place.lives()
    for vm in held:
        assert lives[vm].phase == "registered"
        assert lives[vm].taken_up == 1
        assert lives[vm].address == before[vm].address
        assert pid_of(lives[vm]) == pid_of(before[vm])
        assert [each for each in place.policies() if lives[vm].address in each] == [
            each for each in policies if lives[vm].address in each
        ]
    place.wait_phase(deaf, "reaped")
    place.wait_phase(mute, "reaped")
    lives = place.lives()
    assert lives[deaf].reason == "operator"
    assert lives[mute].reason == "register-timeout", "its time went on while nobody was there"
    place.wait_for(
        lambda lives: all(lives[vm].phase in ("registered", "reaped") for vm in burst), "the burst is decided"
    )
    fates = Counter(place.lives()[vm].reason for vm in burst)
    assert set(fates) <= {None, "launch-failed"}, (
        f"what was half-made is torn down, all else registers: {[place.console(vm) for vm in burst]}"
    )
    assert 1 <= fates["launch-failed"] <= 4, "no more than were in the making"
    end_all(place)
    place.settle()


def test_what_happens_to_a_machine_while_nobody_is_there_and_after_is_noticed(place: MicrovmPlace) -> None:
    first = place.start()
    ends_alone, dies, dies_later = vms = place.ask_for("held", 3)
    place.wait_phases(vms, "registered")
    lives = place.lives()
    place.tell(ends_alone, "sleep 300; exit 5")
    first.kill()
    os.kill(pid_of(lives[dies]), signal.SIGKILL)
    place.start()
    place.wait_phases((ends_alone, dies), "reaped")
    ended = place.lives()
    assert (ended[ends_alone].reason, ended[ends_alone].exit_code) == ("job-complete", 5)
    assert (ended[dies].reason, ended[dies].exit_code) == ("exited", None), "never a guess"
    assert ended[dies_later].phase == "registered"
    killed_at = wall_time()
    os.kill(pid_of(lives[dies_later]), signal.SIGKILL)
    place.wait_phase(dies_later, "reaped")
    state = place.lives()[dies_later]
    assert state.reason == "exited"
    assert state.ended_at is not None
    assert state.ended_at - killed_at < timedelta(seconds=0.5), (
        "by its pidfd, although it is no child of this coordinator"
    )
    place.settle()


def test_an_absence_longer_than_the_grace_costs_no_agent(place: MicrovmPlace) -> None:
    first = place.start()
    vms = place.ask_for("held", 4)
    place.wait_phases(vms, "registered")
    first.kill()
    let_pass(GRACE_S + 1)
    place.start()
    up_at = place.facts()[-1].at
    let_pass(GRACE_S + 1)
    lives = place.lives()
    assert {lives[vm].phase for vm in vms} == {"registered"}
    assert all(lives[vm].changed_at <= up_at + timedelta(seconds=1) for vm in vms)
    end_all(place)
    assert {place.lives()[vm].reason for vm in vms} == {"job-complete"}
    place.settle()


def test_the_embedded_nats_dies_under_running_guests_and_they_come_back(place: MicrovmPlace) -> None:
    coordinator = place.start()
    vms = place.ask_for("held", 4)
    place.wait_phases(vms, "registered")
    for _ in range(2):
        killed = kill_server(coordinator, "fleetlog-nats-")
        wait_until(
            lambda old=killed: server_pid(coordinator, "fleetlog-nats-") not in (None, old),  # type: ignore[misc]
            "NATS is started again",
            30,
        )
    with entered(place.site.host):
        wait_until(lambda: coordinator.health()["status"] == "ok", "the coordinator is well again", 30)
    let_pass(GRACE_S + 1)
    assert {place.lives()[vm].phase for vm in vms} == {"registered"}, "nobody was missed"
    place.wait_phases(place.ask_for("held"), "registered")
    end_all(place)
    assert {state.reason for state in place.lives().values()} == {"job-complete"}
    place.settle()


def test_an_orderly_end_leaves_machines_and_the_next_start_takes_them_up(place: MicrovmPlace) -> None:
    first = place.start()
    (vm,) = place.ask_for("held")
    place.wait_phase(vm, "registered")
    first.stop()
    assert list(place.microvms().values()) == [vm]
    place.start()
    state = place.lives()[vm]
    assert (state.phase, state.taken_up) == ("registered", 1)
    end_all(place)
    place.settle()

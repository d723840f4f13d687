"""`kill -9` of the whole coordinator with agents in every state, on its own NATS and PostgreSQL; what the next one finds."""

from __future__ import annotations

import json
import os
import signal

import pytest

from events.vm import Registered
from tests.acceptance.host import wait_until
from tests.acceptance.place import Coordinator, Place


def lines_of(coordinator: Coordinator, vm: str) -> list[str]:
    """Return what a coordinator passed on of a job's output."""
    texts = [text for text in coordinator.stdout.read_text().split("\n")[:-1] if text]
    said = [each["message"] for each in map(json.loads, texts) if each.get("agent") == vm]
    return [line for line in said if not line.startswith("fleetlog-agent: ")]


def test_agents_in_every_state_are_taken_up_again_or_brought_to_their_end(place: Place) -> None:
    place.configure(max_concurrent_spawns=2, register_timeout_s=4, stop_grace_s=1)
    first = place.start()
    held = [place.demand("held"), place.demand("held")]
    for vm in held:
        place.wait_phase(vm, "registered")
    quick = place.demand("quick")
    place.wait_phase(quick, "reaped")
    stubborn = place.demand("stubborn")
    place.wait_for(lambda lives: lives[stubborn].teardown_tries > 0, "a teardown that fails")
    mute = [place.demand("mute"), place.demand("mute")]
    for vm in mute:
        place.wait_phase(vm, "spawned")
    handles = [place.lives()[vm].handle for vm in (*held, *mute)]
    first.kill()
    for handle in handles:
        assert handle is not None
        assert handle.data["pid"] in place.processes(), "a killed coordinator takes no agent with it"

    place.unclose_all()
    place.start()
    lives = place.lives()
    for vm in held:
        assert lives[vm].phase == "registered"
    for vm in mute:
        place.wait_phase(vm, "reaped")
        assert place.lives()[vm].reason == "register-timeout", "its time went on while nobody was there"
    place.wait_phase(stubborn, "reaped")
    place.open_gate()
    place.wait_all_reaped()
    lives = place.lives()
    assert [lives[vm].reason for vm in held] == ["job-complete"] * 2
    assert lives[quick].reason == "job-complete"
    assert set(place.starts().values()) == {1}
    registrations = [fact for fact in place.facts() if isinstance(fact.event, Registered)]
    assert len(registrations) == 4
    place.settle()


def test_the_output_of_an_agent_goes_on_where_it_was_after_a_kill(place: Place) -> None:
    first = place.start("--agent-lines")
    vm = place.demand("held")
    wait_until(lambda: "line 20" in lines_of(first, vm), "some lines are passed on")
    first.kill()
    second = place.start("--agent-lines")
    wait_until(lambda: len(lines_of(second, vm)) > 10, "the next coordinator passes more of them on")
    place.open_gate()
    place.wait_all_reaped()
    told, more = lines_of(first, vm), lines_of(second, vm)
    first_of_more = int(more[0].removeprefix("line "))
    last_told = int(told[-1].removeprefix("line "))
    assert told == [f"line {n}" for n in range(1, last_told + 1)]
    assert first_of_more <= last_told + 1, "no line is lost"
    assert first_of_more > 1, "and it does not begin anew"
    last = len(more) - 2 + first_of_more
    assert more == [*(f"line {n}" for n in range(first_of_more, last + 1)), "last line"]
    logged = place.ask("agent", "logs", vm, "--lines", "5")["lines"]
    assert logged[-1] == "last line"
    place.settle()


def test_what_ends_while_nobody_is_there_is_found_ended(place: Place) -> None:
    first = place.start()
    done, dead = place.demand("held"), place.demand("held")
    for vm in (done, dead):
        place.wait_phase(vm, "registered")
    handle = place.lives()[dead].handle
    assert handle is not None
    first.kill()
    os.kill(handle.data["pid"], signal.SIGKILL)
    place.open_gate()
    wait_until(lambda: len(place.processes()) <= 1, "one job is done, and its agent waits to say so")
    place.start()
    place.wait_all_reaped()
    lives = place.lives()
    assert (lives[done].reason, lives[done].exit_code) == ("job-complete", 0), "the agent told how it ended"
    assert (lives[dead].reason, lives[dead].exit_code) == ("exited", None), "never a guess"
    place.settle()


@pytest.mark.usefixtures("root")
def test_after_a_reboot_of_the_host_every_machine_is_gone_and_the_fleet_goes_on(place: Place) -> None:
    place.start()
    vms = [place.demand("held"), place.demand("mute")]
    place.wait_phase(vms[0], "registered")
    place.wait_phase(vms[1], "spawned")
    place.power_cut()
    assert place.processes() == {}

    boot = "00000000-aaaa-bbbb-cccc-000000000001"
    place.start(boot_id=boot)
    place.wait_all_reaped()
    for state in place.lives().values():
        assert state.reason == "host-rebooted"
        assert boot not in state.boot_id
    vm = place.demand("quick")
    place.wait_all_reaped()
    assert place.lives()[vm].boot_id == boot
    assert place.lives()[vm].reason == "job-complete"
    place.settle()


def test_an_orderly_end_leaves_agents_and_the_next_start_takes_them_up(place: Place) -> None:
    first = place.start()
    vm = place.demand("held")
    place.wait_phase(vm, "registered")
    first.stop()
    assert place.processes()
    place.start()
    assert place.lives()[vm].phase == "registered"
    place.ask("agent", "rm", vm, expect=3)
    place.ask("agent", "rm", vm, "--force")
    place.wait_all_reaped()
    assert place.lives()[vm].reason == "operator"
    place.settle()


def test_kills_in_a_row_lose_nothing_and_start_nothing_twice(place: Place) -> None:
    place.start()
    vms = {place.demand("held")}
    for _ in range(3):
        coordinator = place.coordinators[-1]
        with place.asking("demand", "-l", "held", "--count", "2"):
            before = len(place.lives())
            place.wait_for(lambda lives, n=before: len(lives) > n, "demand is decided")  # type: ignore[misc]
            coordinator.kill()
        place.start()
        vms = set(place.lives())
    place.wait_for(
        lambda lives: all(state.phase == "registered" for state in lives.values()), "all of them are in"
    )
    assert set(place.starts()) == vms
    place.open_gate()
    place.wait_all_reaped()
    assert {state.reason for state in place.lives().values()} == {"job-complete"}
    place.settle()

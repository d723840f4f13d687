"""What every driver promises, asked of each of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.driver import Driver
from actors.errors import DriverError
from events.vm import Handle
from tests.contract.driver_rigs import (
    LABELS,
    BareMetalRig,
    Ends,
    FirecrackerRig,
    ProcessGroupRig,
    Rig,
    ScriptedRig,
    order,
    wait_until,
)

VM = "vm-01"


@pytest.fixture(params=["scripted", "bare-metal", "bare-metal-without-cgroup", "firecracker"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made: Rig
    match request.param:
        case "scripted":
            made = ScriptedRig()
        case "bare-metal":
            made = BareMetalRig(tmp_path)
        case "firecracker":
            made = FirecrackerRig()
        case _:
            made = ProcessGroupRig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def driver(rig: Rig) -> Iterator[Driver]:
    made = rig.driver()
    yield made
    made.close()


def spawn(driver: Driver, vm: str = VM) -> tuple[dict[str, object], Handle]:
    placement = driver.plan(vm, "pool", LABELS)
    return placement, driver.spawn(order(vm, placement), threading.Event())


def test_a_plan_touches_nothing(rig: Rig, driver: Driver) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    assert placement["boot_id"]
    assert rig.survey(driver) == []
    assert driver.inspect(VM, placement, None).presence == "absent"


def test_a_spawned_machine_runs_and_is_provably_itself(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    assert rig.runs(handle)
    found = driver.inspect(VM, placement, handle)
    assert found.presence == "running"
    assert found.handle == handle
    assert found.evidence


def test_a_running_machine_is_found_without_a_handle(driver: Driver) -> None:
    placement, handle = spawn(driver)
    assert driver.inspect(VM, placement, None).handle == handle


def test_an_end_is_told_once_with_its_exit_code(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    rig.end_by_itself(VM, handle)
    assert ends.wait().exit_code == rig.end_code
    wait_until(
        lambda: driver.inspect(VM, placement, handle).presence == "half-made",
        "an ended machine leaves traces",
    )
    assert len(ends.told) == 1


def test_an_end_before_the_watch_is_told_too(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    rig.end_by_itself(VM, handle)
    wait_until(lambda: not rig.runs(handle), "the machine ended")
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    assert ends.wait().exit_code == rig.end_code


def test_destroy_leaves_nothing_and_says_how_it_knows(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    assert driver.destroy(VM, placement, handle, threading.Event())
    assert not rig.runs(handle)
    assert driver.inspect(VM, placement, handle).presence == "absent"
    assert rig.survey(driver) == []


def test_destroy_can_be_repeated(driver: Driver) -> None:
    placement, handle = spawn(driver)
    for _ in range(3):
        assert driver.destroy(VM, placement, handle, threading.Event())


def test_destroy_of_what_never_was_is_fine(driver: Driver) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    assert driver.destroy(VM, placement, None, threading.Event())


def test_destroy_without_a_handle_ends_a_running_machine(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    driver.destroy(VM, placement, None, threading.Event())
    assert not rig.runs(handle)
    assert rig.survey(driver) == []


def test_a_refused_spawn_is_not_transient_and_leaves_only_what_destroy_removes(
    rig: Rig, driver: Driver
) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    rig.refuse_spawn(driver, VM)
    with pytest.raises(DriverError) as refused:
        driver.spawn(order(VM, placement), threading.Event())
    assert refused.value.kind in ("missing", "refused")
    assert not refused.value.transient
    driver.destroy(VM, placement, None, threading.Event())
    assert driver.inspect(VM, placement, None).presence == "absent"
    assert rig.survey(driver) == []


def test_a_spawn_called_off_beforehand_is_aborted(rig: Rig, driver: Driver) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    abort = threading.Event()
    abort.set()
    with pytest.raises(DriverError) as aborted:
        driver.spawn(order(VM, placement), abort)
    assert aborted.value.kind == "aborted"
    driver.destroy(VM, placement, None, threading.Event())
    assert rig.survey(driver) == []


def test_a_spawn_under_way_ends_soon_after_its_abort(rig: Rig, driver: Driver) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    rig.block_spawn(driver, VM)
    abort = threading.Event()
    errors: list[DriverError] = []

    def run() -> None:
        try:
            driver.spawn(order(VM, placement), abort)
        except DriverError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(
        lambda: driver.inspect(VM, placement, None).presence != "absent", "the spawn left its first trace"
    )
    assert thread.is_alive()
    abort.set()
    thread.join(10)
    assert [error.kind for error in errors] == ["aborted"]
    driver.destroy(VM, placement, None, threading.Event())
    assert rig.survey(driver) == []


def test_a_new_driver_takes_a_running_machine_up_again(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    driver.close()
    assert rig.runs(handle), "machines run on after close"
    second = rig.driver()
    try:
        found = second.inspect(VM, placement, handle)
        assert found.presence == "running"
        assert found.handle == handle
        ends = Ends()
        second.watch(VM, placement, handle, ends)
        rig.end_by_itself(VM, handle)
        assert ends.wait().exit_code in (rig.end_code, None), (
            "an exit code nobody could collect is null, never a guess"
        )
        second.destroy(VM, placement, handle, threading.Event())
        assert rig.survey(second) == []
    finally:
        second.close()


def test_a_half_made_machine_is_seen_and_taken_away(rig: Rig, driver: Driver) -> None:
    placement = driver.plan(VM, "pool", LABELS)
    rig.leave_half_made(VM, placement)
    assert driver.inspect(VM, placement, None).presence == "half-made"
    assert {resource.vm for resource in rig.survey(driver)} == {VM}
    driver.destroy(VM, placement, None, threading.Event())
    assert driver.inspect(VM, placement, None).presence == "absent"
    assert rig.survey(driver) == []


def test_a_stranger_with_the_same_process_number_is_never_signalled(rig: Rig, driver: Driver) -> None:
    placement, handle = spawn(driver)
    driver.destroy(VM, placement, handle, threading.Event())
    stale, stranger_lives = rig.impostor(handle)
    assert driver.inspect(VM, placement, stale).presence != "running"
    driver.destroy(VM, placement, stale, threading.Event())
    assert stranger_lives()


def test_a_survey_names_every_machine_and_its_owner(rig: Rig, driver: Driver) -> None:
    placements = [spawn(driver, f"vm-{n}") for n in range(3)]
    listed = rig.survey(driver)
    assert {(resource.vm, resource.owner) for resource in listed} == {
        (f"vm-{n}", rig.owner) for n in range(3)
    }
    for n, (placement, handle) in enumerate(placements):
        driver.destroy(f"vm-{n}", placement, handle, threading.Event())
    assert rig.survey(driver) == []


def test_a_machine_that_wrote_nothing_has_an_empty_tail(driver: Driver) -> None:
    placement, _ = spawn(driver)
    assert driver.log_tail(VM, placement, 10) == ()


def test_close_can_be_repeated(driver: Driver) -> None:
    driver.close()
    driver.close()

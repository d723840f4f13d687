"""Microvms that are called off, cut off or taken up again: at every step, by whichever record there is, to nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.driver import Exit
from actors.errors import DriverError
from events.vm import Handle
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from tests.contract.driver_rigs import Ends, wait_until
from tests.guest.build import build_guest
from tests.guest.halting import write_speaking_kernel
from tests.integration.firecracker_site import NEVER, Site

VM = "vm-01"
STEPS = tuple(
    f"firecracker.spawn.{step}"
    for step in ("directory", "filled", "network", "started", "api", "configured", "running")
)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


def victim(site: Site, placement: dict[str, Any], die_at: str) -> subprocess.Popen[str]:
    """Start a coordinator that dies at that step of its spawn, or waits to be killed after it."""
    told = {
        "config": msgspec.to_builtins(site.config()),
        "segment": site.segment.name,
        "vm": VM,
        "placement": placement,
        "die_at": die_at,
    }
    made = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.firecracker_victim"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdin is not None
    made.stdin.write(json.dumps(told) + "\n")
    made.stdin.flush()
    return made


def killed_coordinator(site: Site, placement: dict[str, Any]) -> Handle:
    """Have a machine brought up by a coordinator that is then killed; return the machine's handle."""
    process_of_it = victim(site, placement, "")
    with process_of_it:
        assert process_of_it.stdout is not None
        handle = msgspec.json.decode(process_of_it.stdout.readline(), type=Handle)
        process_of_it.send_signal(signal.SIGKILL)
    return handle


# Called off


@pytest.mark.parametrize("step", STEPS)
def test_a_spawn_called_off_at_any_step_ends_aborted_or_runs_and_leaves_nothing(
    site: Site, step: str
) -> None:
    abort = threading.Event()
    driver = site.driver(lambda point: abort.set() if point == step else None)
    placement = site.plan(driver, VM)
    if step == STEPS[-1]:
        driver.spawn(site.order(VM, placement), abort)
    else:
        with pytest.raises(DriverError) as caught:
            driver.spawn(site.order(VM, placement), abort)
        assert (caught.value.kind, caught.value.transient) == ("aborted", True)
    driver.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []
    driver.destroy(VM, placement, None, NEVER)
    assert len(site.net.released) == 1, "the address is given back once: it may be another's by now"


@pytest.mark.parametrize("step", STEPS)
def test_a_teardown_that_races_a_spawn_calls_it_off_and_gives_the_address_back_once(
    site: Site, step: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def reach(point: str) -> None:
        if point == step:
            reached.set()
            assert go_on.wait(20)

    driver = site.driver(reach)
    placement = site.plan(driver, VM)
    errors: list[DriverError] = []

    def spawn() -> None:
        try:
            driver.spawn(site.order(VM, placement), threading.Event())
        except DriverError as error:
            errors.append(error)

    spawning = threading.Thread(target=spawn)
    spawning.start()
    assert reached.wait(20)
    ending = threading.Thread(target=driver.destroy, args=(VM, placement, None, NEVER))
    ending.start()
    wait_until(lambda: driver._turns._turns[VM].users == 2, "the teardown waits its turn")
    go_on.set()
    spawning.join(20)
    ending.join(20)
    assert [error.kind for error in errors] == ([] if step == STEPS[-1] else ["aborted"])
    assert site.leftovers() == []
    assert site.net.released == [site.lease(VM).address]


def test_two_teardowns_at_once_give_the_address_back_once(site: Site) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    threads = [threading.Thread(target=driver.destroy, args=(VM, placement, handle, NEVER)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert site.leftovers() == []
    assert len(site.net.released) == 1


def test_a_teardown_can_be_called_off_while_the_guest_has_its_grace(site: Site) -> None:
    site.changes["stop_grace_s"] = 60.0
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    abort = threading.Event()
    abort.set()
    with pytest.raises(DriverError) as caught:
        driver.destroy(VM, placement, handle, abort)
    assert caught.value.kind == "aborted"
    assert driver.inspect(VM, placement, handle).presence == "running"
    driver.config = msgspec.structs.replace(driver.config, stop_grace_s=0.1)
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


# Cut off


@pytest.mark.parametrize("step", STEPS)
def test_a_coordinator_killed_at_any_step_leaves_what_its_successor_finds_and_takes_away(
    site: Site, step: str
) -> None:
    placement = site.plan(site.driver(), VM)
    with victim(site, placement, step) as dead:
        assert dead.wait(30) == -signal.SIGKILL
    successor = site.driver()
    expected = "running" if step == STEPS[-1] else "half-made"
    wait_until(
        lambda: successor.inspect(VM, placement, None).presence == expected, f"it is {expected} after {step}"
    )
    successor.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []
    assert successor.inspect(VM, placement, None).presence == "absent"


def test_a_machine_outlives_its_coordinator_and_is_taken_up_with_its_log(site: Site) -> None:
    site.kernel = build_guest()
    placement = site.plan(site.driver(), VM)
    handle = killed_coordinator(site, placement)
    successor = site.driver()
    found = successor.inspect(VM, placement, handle)
    assert (found.presence, found.handle) == ("running", handle)
    assert successor.inspect(VM, placement, None).handle == handle, "found without a handle, it is the same"
    ends = Ends()
    successor.watch(VM, placement, handle, ends)
    wait_until(lambda: any("guest: up" in line for _, line in site.lines), "its console is followed")
    with process_held(handle) as pidfd:
        os.kill(handle.data["pid"], signal.SIGKILL)
        wait_until(lambda: process.pidfd_ended(pidfd), "it is dead")
        dead = time.monotonic()
    assert ends.wait() == Exit(exit_code=None, detail="ended; it was not our child")
    assert time.monotonic() - dead < 0.5
    successor.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


def test_lines_that_were_passed_on_are_not_passed_on_again(site: Site) -> None:
    site.kernel = write_speaking_kernel(site.root / "once.elf", "said once\n")
    first = site.driver()
    placement, handle = site.spawn(first, VM)
    wait_until(lambda: any("said once" in line for _, line in site.lines), "it is passed on")
    first.close()
    second = site.driver()
    second.watch(VM, placement, handle, lambda _: None)
    second.destroy(VM, placement, handle, NEVER)
    assert sum("said once" in line for _, line in site.lines) == 1


# Which process it is


class process_held:  # noqa: N801 - reads as a verb
    """Hold a pidfd of a handle's process."""

    def __init__(self, handle: Handle) -> None:
        self._pidfd = os.pidfd_open(handle.data["pid"])

    def __enter__(self) -> int:
        return self._pidfd

    def __exit__(self, *_: object) -> None:
        os.close(self._pidfd)


def dead_machine(site: Site) -> tuple[FirecrackerDriver, dict[str, Any], Paths]:
    """Return a machine that died, seen by a driver that knows only what is on the disk."""
    placement = site.plan(site.driver(), VM)
    handle = killed_coordinator(site, placement)
    os.kill(handle.data["pid"], signal.SIGKILL)
    driver = site.driver()
    wait_until(lambda: driver.inspect(VM, placement, handle).presence == "half-made", "it is dead")
    return driver, placement, Paths(site.base, VM)


@pytest.mark.parametrize("text", ["0", "", "abc", "-1", "1"])
def test_a_pid_file_that_names_no_process_signals_nothing_and_the_chroot_goes(site: Site, text: str) -> None:
    driver, placement, paths = dead_machine(site)
    paths.pid_file.write_text(text)
    driver.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []


def test_a_recycled_number_reads_as_dead_and_the_stranger_lives(
    site: Site, stranger: subprocess.Popen[bytes]
) -> None:
    driver, placement, paths = dead_machine(site)
    paths.pid_file.write_text(str(stranger.pid))
    long_ago = paths.pid_file.stat().st_mtime - 3600
    os.utime(paths.pid_file, (long_ago, long_ago))
    assert driver.inspect(VM, placement, None).presence == "half-made"
    driver.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []
    assert stranger.poll() is None


def test_a_process_that_is_not_provably_it_is_not_signalled_and_its_files_are_kept(
    site: Site, stranger: subprocess.Popen[bytes]
) -> None:
    driver, placement, paths = dead_machine(site)
    paths.pid_file.write_text(str(stranger.pid))
    assert driver.inspect(VM, placement, None).presence == "unknown"
    with pytest.raises(DriverError, match="not signalled without proof") as caught:
        driver.destroy(VM, placement, None, NEVER)
    assert caught.value.kind == "still-there"
    assert stranger.poll() is None
    assert paths.chroot.exists()
    paths.pid_file.unlink()
    driver.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []


def test_the_end_of_what_is_not_provably_it_is_not_told_as_its_end_while_it_lives(
    site: Site, stranger: subprocess.Popen[bytes]
) -> None:
    driver, placement, _ = dead_machine(site)
    stat = process.stat(stranger.pid)
    assert stat is not None
    data = {"pid": stranger.pid, "start_ticks": stat.start_ticks, "boot_id": placement["boot_id"]}
    doubtful = Handle(driver="firecracker", version=1, data=data)
    assert driver.inspect(VM, placement, doubtful).presence == "unknown"
    ends = Ends()
    driver.watch(VM, placement, doubtful, ends)
    with pytest.raises(DriverError, match="not signalled without proof"):
        driver.destroy(VM, placement, doubtful, NEVER)
    assert (ends.told, stranger.poll()) == ([], None)
    stranger.kill()
    ends.wait()
    driver.destroy(VM, placement, doubtful, NEVER)
    assert site.leftovers() == []


def test_another_machines_firecracker_is_not_taken_for_it(site: Site) -> None:
    driver, placement, paths = dead_machine(site)
    other_placement, other = site.spawn(driver, "vm-02")
    paths.pid_file.write_text(str(other.data["pid"]))
    with pytest.raises(DriverError, match="another root directory"):
        driver.destroy(VM, placement, None, NEVER)
    assert driver.inspect("vm-02", other_placement, other).presence == "running"
    paths.pid_file.write_text("0")
    driver.destroy(VM, placement, None, NEVER)
    assert driver.inspect("vm-02", other_placement, other).presence == "running"


def test_a_machine_of_another_boot_is_dead_whatever_its_number_is_now(
    site: Site, stranger: subprocess.Popen[bytes]
) -> None:
    driver, placement, paths = dead_machine(site)
    paths.pid_file.write_text(str(stranger.pid))
    placement["boot_id"] = "00000000-0000-0000-0000-000000000000"
    assert driver.inspect(VM, placement, None).presence == "half-made"
    driver.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []
    assert stranger.poll() is None


def test_a_removed_pid_file_hides_no_running_machine(site: Site) -> None:
    placement = site.plan(site.driver(), VM)
    handle = killed_coordinator(site, placement)
    Paths(site.base, VM).pid_file.unlink()
    successor = site.driver()
    assert successor.inspect(VM, placement, None).handle == handle
    successor.destroy(VM, placement, None, NEVER)
    assert site.leftovers() == []

"""Real, jailed microVMs under the driver: whole lives, failures, aborts and crashes, and what is left of each: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.driver import Exit
from actors.errors import DriverError
from events.envelope import Resources
from infra.drivers.firecracker import identity, limits
from infra.drivers.firecracker.api import Api, Request
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.gate import Gate
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from tests.contract.driver_rigs import Ends, wait_until
from tests.guest.build import build_guest
from tests.guest.halting import write_speaking_kernel
from tests.integration.firecracker_site import NEVER, UID, Site
from tests.tap_guest import TapGuest

VM = "vm-01"
SECRET = "eyJ0-the-credential-of-an-agent"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def guest(site: Site) -> Site:
    """Return the site with the test guest as its kernel."""
    site.kernel = build_guest()
    return site


def agent(test: str = "", **more: str) -> dict[str, str]:
    return {
        "FLEETLOG_AGENT_ID": VM,
        "FLEETLOG_CLUSTER": "c",
        "FLEETLOG_AGENT_LABELS": "linux",
        "FLEETLOG_NATS_URL": "nats://10.44.0.1:4",  # nobody listens: it goes on asking
        **more,
        "test": test,
    }


def console_has(driver: FirecrackerDriver, placement: dict[str, Any], text: str) -> Callable[[], bool]:
    return lambda: any(text in line for line in driver.log_tail(VM, placement, 100))


def failing(site: Site, driver: FirecrackerDriver, vm: str = VM, **environment: str) -> DriverError:
    """Return the error of a spawn that must fail, and see that its teardown leaves nothing."""
    placement = site.plan(driver, vm)
    with pytest.raises(DriverError) as caught:
        driver.spawn(site.order(vm, placement, None, **environment), threading.Event())
    driver.destroy(vm, placement, None, NEVER)
    assert site.leftovers() == []
    assert driver.inspect(vm, placement, None).presence == "absent"
    return caught.value


# Lives


def test_a_guest_reads_who_it_is_and_ends_by_itself(guest: Site) -> None:
    driver = guest.driver()
    placement, handle = guest.spawn(driver, VM, **agent("exit-early"))
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    assert ends.wait() == Exit(exit_code=0, detail="exited with code 0")
    assert console_has(driver, placement, f"agent {VM}, labels linux")()
    assert driver.destroy(VM, placement, handle, NEVER)
    assert guest.leftovers() == []
    said = [msgspec.json.decode(line) for vm, line in guest.lines if vm == VM]
    assert any(line["source"] == "firecracker-serial" and "labels linux" in line["message"] for line in said)
    assert console_has(driver, placement, "labels linux")(), "the console is kept when the chroot is gone"


def test_ctrl_alt_del_lets_a_guest_say_goodbye(guest: Site) -> None:
    guest.changes["stop_grace_s"] = 10.0
    driver = guest.driver()
    placement, handle = guest.spawn(driver, VM, **agent())
    wait_until(console_has(driver, placement, "metadata"), "the guest has its metadata")
    assert "after Ctrl-Alt-Del" in driver.destroy(VM, placement, handle, NEVER)
    assert any("goodbye" in line for _, line in guest.lines), (
        "its last words are passed on before its chroot goes"
    )
    assert guest.leftovers() == []


def test_a_guest_that_ignores_ctrl_alt_del_is_killed_after_the_grace(guest: Site) -> None:
    driver = guest.driver()
    placement, handle = guest.spawn(driver, VM, **agent("ignore-ctrl-alt-del"))
    wait_until(console_has(driver, placement, "metadata"), "the guest has its metadata")
    assert "killed after 0.3" in driver.destroy(VM, placement, handle, NEVER)
    assert guest.leftovers() == []


def test_the_credential_is_in_no_file_argument_or_representation_and_can_be_cleared(guest: Site) -> None:
    driver = guest.driver()
    placement, handle = guest.spawn(driver, VM, **agent(FLEETLOG_AGENT_CREDENTIAL=SECRET))
    paths = Paths(guest.base, VM)
    files = [path for path in guest.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    shown = json.dumps(placement) + repr(handle) + repr(guest.lines)
    assert SECRET not in shown
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{handle.data['pid']}/{name}").read_bytes()
    api = Api(paths.socket)
    assert SECRET.encode() in api.call(Request("GET", "/mmds"))[0].body
    driver.clear_bootstrap(VM, placement, handle)
    assert msgspec.json.decode(api.call(Request("GET", "/mmds"))[0].body) == {"latest": {"meta-data": {}}}
    whole = msgspec.json.decode(api.call(Request("GET", "/vm/config"))[0].body)
    assert whole["mmds-config"]["version"] == "V2"
    api.close()


def test_clearing_the_metadata_of_a_dead_machine_is_no_failure(site: Site) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    os.kill(handle.data["pid"], signal.SIGKILL)
    wait_until(lambda: driver.inspect(VM, placement, handle).presence != "running", "it is dead")
    driver.clear_bootstrap(VM, placement, handle)


def test_the_jail_holds_links_of_the_images_and_what_is_its_own(site: Site) -> None:
    before = (site.kernel.stat(), site.rootfs.stat())
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    paths = Paths(site.base, VM)
    assert paths.rootfs.stat().st_ino == site.rootfs.stat().st_ino
    assert paths.kernel.stat().st_ino == site.kernel.stat().st_ino
    assert (paths.overlay.stat().st_uid, paths.overlay.stat().st_mode & 0o777) == (UID, 0o600)
    status = Path(f"/proc/{handle.data['pid']}/status").read_text()
    assert f"Uid:\t{UID}\t{UID}" in status
    assert "CapEff:\t0000000000000000" in status
    opened = [str(each.readlink()) for each in Path(f"/proc/{handle.data['pid']}/fd").iterdir()]
    files = {name for name in opened if name.startswith("/") and not name.startswith("/dev/")}
    assert files <= {
        str(paths.serial_log),
        str(paths.stderr_log),
        "/vmm.log",
        "/rootfs.ext4",
        "/overlay.ext4",
        "/kernel",
    }
    assert len([name for name in opened if name.startswith("socket:")]) <= 3, "none of ours went along"
    driver.destroy(VM, placement, handle, NEVER)
    for was, path in zip(before, (site.kernel, site.rootfs), strict=True):
        now = path.stat()
        assert (now.st_uid, now.st_gid, now.st_mode, now.st_nlink) == (
            was.st_uid,
            was.st_gid,
            was.st_mode,
            was.st_nlink,
        )


def test_an_end_is_told_in_milliseconds(site: Site) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    told: list[float] = []
    over = threading.Event()

    def tell(_: Exit) -> None:
        told.append(time.monotonic())
        over.set()

    driver.watch(VM, placement, handle, tell)
    with identity.held(handle.data["pid"]) as pidfd:
        assert pidfd is not None
        os.kill(handle.data["pid"], signal.SIGKILL)
        wait_until(lambda: process.pidfd_ended(pidfd), "it is dead")
        dead = time.monotonic()
    assert over.wait(5)
    assert told[0] - dead < 0.25


def test_declared_limits_are_held_by_a_cgroup_that_goes_with_the_machine(site: Site) -> None:
    found = limits.detect()
    if found.version != 1:
        pytest.skip("the first version of cgroups has no CPU and memory controllers on this host")
    driver = site.driver()
    placement = site.plan(driver, VM)
    order = site.order(VM, placement, Resources(cpus=0.5, memory_bytes=32 * 1024 * 1024))
    handle = driver.spawn(order, threading.Event())
    places = {name: Path(place) / limits.parent(site.owner) / VM for name, place in found.places.items()}
    assert (places["cpu"] / "cpu.cfs_quota_us").read_text().strip() == "50000"
    assert int((places["memory"] / "memory.limit_in_bytes").read_text()) == 128 * 1024 * 1024
    assert str(handle.data["pid"]) in (places["memory"] / "cgroup.procs").read_text().split()
    assert {resource.kind for resource in driver.survey() if resource.vm == VM} == {"chroot", "cgroup"}
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


def test_thirty_two_at_once_all_run_and_all_go(site: Site) -> None:
    gate = Gate(4)
    driver = site.driver(gate=gate)
    vms = [f"vm-{n:02}" for n in range(32)]
    plans = {vm: site.plan(driver, vm) for vm in vms}
    with ThreadPoolExecutor(32) as pool:
        handles = dict(
            zip(
                vms,
                pool.map(lambda vm: driver.spawn(site.order(vm, plans[vm]), threading.Event()), vms),
                strict=True,
            )
        )
        assert len({handle.data["pid"] for handle in handles.values()}) == 32
        assert {driver.inspect(vm, plans[vm], handles[vm]).presence for vm in vms} == {"running"}
        assert len(site.processes()) == 32
        list(pool.map(lambda vm: driver.destroy(vm, plans[vm], handles[vm], NEVER), vms))
    assert site.leftovers() == []
    assert sorted(site.net.released) == sorted(site.lease(vm).address for vm in vms)


# Failures


def test_a_console_flood_is_bounded_on_the_disk_and_in_memory(site: Site) -> None:
    site.kernel = write_speaking_kernel(site.root / "flood.elf", "x" * 2000 + "\n", "repeat")
    site.changes["live_log_bytes"] = 16 * 1024
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    log = Paths(site.base, VM).serial_log
    wait_until(lambda: log.stat().st_size > 64 * 1024, "it floods", 40)
    wait_until(lambda: log.stat().st_blocks * 512 <= 32 * 1024, "the old part is given back", 40)
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


@pytest.mark.parametrize(
    ("console", "found"),
    [
        ("Kernel panic - not syncing: Fatal exception", "kernel-panic"),
        ("VFS: Unable to mount root fs on unknown-block(254,0)", "rootfs-mount-failure"),
        ("Failed to execute /init (error -2)", "init-failure"),
    ],
)
def test_a_boot_that_fails_says_why(site: Site, console: str, found: str) -> None:
    site.kernel = write_speaking_kernel(site.root / "panic.elf", f"{console}\n", "reset")
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    assert ends.wait() == Exit(exit_code=0, detail=f"exited with code 0; the console says {found}")
    driver.destroy(VM, placement, handle, NEVER)
    line = next(msgspec.json.decode(line) for _, line in site.lines if console in line)
    assert (line["level"], line["source"]) == ("error", "firecracker-serial")
    assert site.leftovers() == []


def test_a_jailer_that_fails_ends_the_wait_with_its_code_and_reason(site: Site) -> None:
    jailer = site.root / "jailer"
    jailer.write_text("#!/bin/sh\necho no such jail >&2\nexit 7\n")
    jailer.chmod(0o755)
    site.changes["jailer_path"] = str(jailer)
    began = time.monotonic()
    error = failing(site, site.driver())
    assert "exited with code 7 before the machine ran: no such jail" in str(error)
    assert (error.kind, error.transient) == ("refused", False)
    assert time.monotonic() - began < 10
    said = [msgspec.json.decode(line) for _, line in site.lines]
    (line,) = [line for line in said if line["message"] == "boot failed"]
    assert (line["exit_code"], line["signal"], line["class"], line["level"]) == (7, None, "unknown", "error")
    assert "no such jail" in [line["message"] for line in said], "its last words are passed on"


def test_the_real_jailers_own_words_are_told(site: Site) -> None:
    site.changes["netns"] = "/run/netns/flt-no-such"
    error = failing(site, site.driver())
    assert "before the machine ran" in str(error)
    assert "flt-no-such" in str(error) or "No such file" in str(error)


def test_an_api_that_never_answers_ends_the_wait_at_the_configured_time(site: Site) -> None:
    jailer = site.root / "jailer"
    jailer.write_text("#!/bin/sh\nexec sleep 600\n")
    jailer.chmod(0o755)
    site.changes |= {"jailer_path": str(jailer), "socket_wait_s": 0.2}
    error = failing(site, site.driver())
    assert (error.kind, error.transient) == ("timeout", True)
    assert "within 0.2 s" in str(error)


BROKEN: list[tuple[str, Callable[[Site], object], str]] = [
    ("missing", lambda site: site.changes.update(jailer_path="/no/jailer"), "jailer_path /no/jailer"),
    ("missing", lambda site: site.changes.update(firecracker_path="/no/firecracker"), "/no/firecracker"),
    ("missing", lambda site: site.kernel.unlink(), "kernel_path"),
    ("refused", lambda site: site.kernel.write_bytes(b"no kernel"), "no ELF file"),
    ("refused", lambda site: site.kernel.write_bytes(b"\x7fELF" + bytes(200)), "Firecracker refused PUT /actions: 400"),
    ("missing", lambda site: site.rootfs.unlink(), "rootfs_path"),
    ("refused", lambda site: os.truncate(site.rootfs, 4096), "truncated"),
    ("refused", lambda site: site.rootfs.chmod(0o600), "cannot be read by uid"),
    ("refused", lambda site: site.label_changes.update(env={"A": "\x01" * 20_000}), "Firecracker takes 51200"),
    ("refused", lambda site: site.changes.update(vcpus=33), "at most 32"),
    ("unknown", lambda site: setattr(site.net, "fail_attach", DriverError("unknown", "no tap", transient=True)), "no tap"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "break_it", "said"), BROKEN, ids=[each[2] for each in BROKEN])
def test_what_cannot_come_up_says_so_and_leaves_nothing(
    site: Site, kind: str, break_it: Callable[[Site], object], said: str
) -> None:
    break_it(site)
    error = failing(site, site.driver())
    assert error.kind == kind
    assert said in str(error)


@pytest.mark.parametrize(("kind", "break_it", "said"), [each for each in BROKEN if each[0] == "missing"][:2])
def test_what_is_refused_before_it_is_begun_touches_nothing(
    site: Site, kind: str, break_it: Callable[[Site], object], said: str
) -> None:
    break_it(site)
    driver = site.driver()
    placement = site.plan(driver, VM)
    with pytest.raises(DriverError):
        driver.spawn(site.order(VM, placement), threading.Event())
    assert site.leftovers() == []


def test_a_tap_in_use_is_told_and_may_pass(site: Site) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    site.leases["vm-02"] = site.lease(VM)
    other = site.plan(driver, "vm-02")
    with pytest.raises(DriverError, match="Resource busy") as caught:
        driver.spawn(site.order("vm-02", other), threading.Event())
    assert (caught.value.kind, caught.value.transient) == ("exhausted", True)
    assert driver.inspect(VM, placement, handle).presence == "running"
    driver.destroy(VM, placement, handle, NEVER)
    driver.destroy("vm-02", other, None, NEVER)
    assert site.leftovers() == []


def test_a_tap_that_another_process_lets_go_of_soon_is_waited_for(site: Site) -> None:
    """As a child between fork and exec does, with its copy of the descriptor that we closed."""
    holders: list[TapGuest] = []

    def reach(point: str) -> None:
        if point == "firecracker.spawn.api":
            holders.append(TapGuest(site.lease(VM), site.segment.path))
            threading.Timer(0.2, holders[0].__exit__, (None, None, None)).start()

    driver = site.driver(reach)
    placement, handle = site.spawn(driver, VM)
    assert len(holders) == 1, "the TAP was held while it was configured"
    assert driver.inspect(VM, placement, handle).presence == "running"
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


def test_a_machine_whose_id_is_taken_is_refused_and_the_first_one_lives(site: Site) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    with pytest.raises(DriverError, match="ids are never reused"):
        driver.spawn(site.order(VM, placement), threading.Event())
    assert driver.inspect(VM, placement, handle).presence == "running"


def test_a_full_disk_in_the_middle_of_a_copy_leaves_nothing(site: Site) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(site.base)], check=True, timeout=30)
    try:
        driver = site.driver()
        placement = site.plan(driver, VM)
        driver._templates.get(8, NEVER)
        with suppress(OSError), (site.base / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        (site.base / "filler").open("r+b").close()
        os.truncate(site.base / "filler", (site.base / "filler").stat().st_size - 64 * 1024)
        with pytest.raises(DriverError, match="No space left") as caught:
            driver.spawn(site.order(VM, placement), threading.Event())
        assert (caught.value.kind, caught.value.transient) == ("exhausted", True)
        driver.destroy(VM, placement, None, NEVER)
        assert [left for left in site.leftovers() if "overlay" not in left] == []
    finally:
        subprocess.run(["umount", str(site.base)], check=True, timeout=30)


def test_images_on_another_file_system_are_copied(site: Site) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(site.base)], check=True, timeout=30
    )
    try:
        driver = site.driver()
        placement, handle = site.spawn(driver, VM)
        assert driver.inspect(VM, placement, handle).presence == "running"
        driver.destroy(VM, placement, handle, NEVER)
        assert site.leftovers() == []
    finally:
        subprocess.run(["umount", str(site.base)], check=True, timeout=30)


@pytest.mark.timeout(600)
def test_many_failing_spawns_leave_nothing(site: Site) -> None:
    """2,000 with FLEETLOG_SOAK, 100 without; failing before, in and after the jailer."""
    count = 2000 if os.environ.get("FLEETLOG_SOAK") else 100
    jailer = site.root / "jailer"
    jailer.write_text("#!/bin/sh\nexit 1\n")
    jailer.chmod(0o755)
    site.changes["jailer_path"] = str(jailer)
    early = site.driver()
    del site.changes["jailer_path"]
    site.kernel.write_bytes(b"\x7fELF" + bytes(200))
    late = site.driver()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    def fail(n: int) -> None:
        vm, driver = f"vm-{n}", (early, late)[n % 2]
        placement = plans[n]
        with pytest.raises(DriverError):
            driver.spawn(site.order(vm, placement), threading.Event())
        driver.destroy(vm, placement, None, NEVER)

    plans = [site.plan(early, f"vm-{n}") for n in range(count)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, range(count)))
    assert site.leftovers() == []
    assert len(os.listdir("/proc/self/fd")) <= before[0] + 10  # noqa: PTH208
    assert threading.active_count() <= before[1] + 6

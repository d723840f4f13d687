"""Host processes proven, found again and bounded: what is not provably ours is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import pytest

from actors.errors import DriverError
from events.envelope import Resources
from infra.drivers.bare_metal import hierarchy, launch
from infra.drivers.bare_metal.rundir import Mark, RunDirectory
from infra.host_process import process
from infra.host_process.cgroup import Mount, mounts
from tests.contract.driver_rigs import Ends
from tests.integration.bare_metal_site import VM, Site, alive
from tests.needed import need_root

NEVER = threading.Event()
SLEEP = "while :; do sleep 600 & wait; done"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.script(SLEEP)
    yield made
    made.clean()
    made.assert_nothing_is_left()


@pytest.fixture(params=["auto", "none"])
def either(request: pytest.FixtureRequest, site: Site) -> Site:
    """Return the site with and without cgroups."""
    cgroup: Literal["auto", "none"] = request.param
    site.configure(cgroup=cgroup)
    return site


@pytest.mark.parametrize("pid", [os.getpid(), 1, 0, -1, True, "12", 2**40])
def test_a_record_that_names_somebody_else_signals_nobody(either: Site, pid: object) -> None:
    driver = either.driver()
    placement, handle = either.spawn(driver)
    driver.destroy(VM, placement, handle, NEVER)
    stale = msgspec.structs.replace(handle, data={**handle.data, "pid": pid})
    assert driver.inspect(VM, placement, stale).presence == "absent"
    driver.destroy(VM, placement, stale, NEVER)
    ends = Ends()
    driver.watch(VM, placement, stale, ends)
    assert ends.wait().exit_code is None


@pytest.mark.parametrize("claimed", ["0", "-1", "", "abc", "1"])
def test_a_number_the_process_did_not_write_is_no_process(either: Site, claimed: str) -> None:
    driver = either.driver()
    placement = driver.plan(VM, "pool", ("metal",))
    run = RunDirectory(Path(placement["run"]))
    run.create(Mark(vm=VM, owner="x", boot_id=placement["boot_id"], cookie="c" * 32))
    (run.live / "pid").write_text(claimed)
    assert driver.inspect(VM, placement, None).presence == "half-made"
    assert "no process was left" in driver.destroy(VM, placement, None, NEVER)


def test_a_process_of_another_boot_is_gone_however_well_its_number_fits(either: Site) -> None:
    driver = either.driver()
    placement, handle = either.spawn(driver)
    driver.destroy(VM, placement, handle, NEVER)
    stranger = subprocess.Popen(["sleep", "600"])
    stat = process.stat(stranger.pid)
    assert stat is not None
    data = {**handle.data, "pid": stranger.pid, "start_ticks": stat.start_ticks, "boot_id": "another"}
    before = msgspec.structs.replace(handle, data=data)
    placement = {**placement, "boot_id": "another"}
    try:
        found = driver.inspect(VM, placement, before)
        assert found.presence == "absent"
        assert "another boot" in found.evidence
        driver.destroy(VM, placement, before, NEVER)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_doubt_is_unknown_and_signals_nobody(site: Site) -> None:
    site.configure(cgroup="none")
    driver = site.driver()
    placement, handle = site.spawn(driver)
    driver.destroy(VM, placement, handle, NEVER)
    stranger = subprocess.Popen(["sleep", "600"])
    stat = process.stat(stranger.pid)
    assert stat is not None
    # number and start fit, and nothing else does
    data = {**handle.data, "pid": stranger.pid, "start_ticks": stat.start_ticks, "executable": "/other"}
    doubtful = msgspec.structs.replace(handle, data=data)
    try:
        assert driver.inspect(VM, placement, doubtful).presence == "unknown"
        with pytest.raises(DriverError, match="without proof") as spared:
            driver.destroy(VM, placement, doubtful, NEVER)
        assert spared.value.transient
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_launcher_that_comes_late_finds_itself_unwanted(site: Site) -> None:
    run = RunDirectory(site.root / "run")
    run.create(Mark(vm=VM, owner="x", boot_id="b", cookie="c"))
    command = ["/bin/sh", "-c", launch.LAUNCHER, str(run.path), "--", "/bin/echo", "I run"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"I run\n"
    run.close_to_newcomers()
    late = subprocess.run(command, capture_output=True, check=False)
    assert (late.returncode, late.stdout) == (125, b"")
    run.remove()


def test_a_memory_limit_bites_where_the_host_can_limit(site: Site) -> None:
    need_root()
    if not any("memory" in mount.controllers for mount in mounts("cgroup")):
        pytest.skip("no v1 memory controller here")
    site.configure(enforce_limits=True)
    site.script("echo > ready; dd if=/dev/zero of=/dev/null bs=200M count=1; echo survived")
    driver = site.driver()
    placement, handle = site.spawn(driver, limits=Resources(memory_bytes=30 * 1024 * 1024, cpus=0.5))
    site.wait_for("ready")
    quota = Path(placement["limits"]["cpu"]) / "cpu.cfs_quota_us"
    assert quota.read_text().strip() == "50000"
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    ends.wait()
    members = Path(placement["limits"]["memory"]) / "memory.max_usage_in_bytes"
    assert int(members.read_text()) <= 30 * 1024 * 1024
    assert "records" not in " ".join(driver.log_tail(VM, placement, 5)), "dd got to copy 200 MB within 30"
    driver.destroy(VM, placement, handle, NEVER)


def test_a_limit_nobody_can_enforce_is_warned_of(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.drivers.bare_metal.limits.v1_directories", lambda *_: {})
    site.configure(enforce_limits=True, cgroup="none")
    _, handle = site.spawn(site.driver(), limits=Resources(memory_bytes=1, cpus=0.01))
    assert "without its limit of ['memory', 'cpu']" in caplog.text
    assert alive(handle.data["pid"])


def test_without_a_cgroup_it_says_what_it_cannot_promise(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.configure(cgroup="none")
    site.driver()
    assert "only their process groups are promised to end" in caplog.text


def test_a_network_policy_is_warned_of(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.label_set(network_policy=True)
    site.driver()
    assert "network_policy of a host process cannot be enforced" in caplog.text


def test_a_host_without_a_cgroup2_mount_gets_one_and_loses_it_at_its_teardown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root()
    point = hierarchy.private_mount_point(Path(site.config.state_dir))

    def own(kind: str) -> tuple[Mount, ...]:
        return tuple(mount for mount in mounts(kind) if mount.point == point)

    monkeypatch.setattr(hierarchy, "mounts", own)
    driver = site.driver()
    placement, handle = site.spawn(driver)
    assert (
        str(handle.data["pid"]) in (point / "fleetlog" / site.config.owner / VM / "cgroup.procs").read_text()
    )
    assert len(own("cgroup2")) == 1
    site.driver()
    assert len(own("cgroup2")) == 1, "a second driver finds the mount of the first"
    driver.destroy(VM, placement, handle, NEVER)
    assert "unmounted" in driver.teardown_host()
    assert own("cgroup2") == ()


def test_cgroups_that_the_agent_made_go_with_it(site: Site) -> None:
    need_root()
    driver = site.driver()
    placement, handle = site.spawn(driver)
    nested = hierarchy.Hierarchy(mounts("cgroup2")[0], "/").cgroup(placement["cgroup"]).path / "a" / "b"
    nested.mkdir(parents=True)
    (nested / "cgroup.procs").write_text(str(handle.data["pid"]))
    assert driver.inspect(VM, placement, handle).presence == "running"
    driver.destroy(VM, placement, handle, NEVER)
    assert not alive(handle.data["pid"])


def test_an_agent_that_leaves_its_cgroup_is_still_found_and_ended(site: Site) -> None:
    need_root()
    driver = site.driver()
    placement, handle = site.spawn(driver)
    (mounts("cgroup2")[0].point / "cgroup.procs").write_text(str(handle.data["pid"]))
    assert driver.inspect(VM, placement, None).presence == "running"
    driver.destroy(VM, placement, handle, NEVER)
    assert not alive(handle.data["pid"])


def test_nothing_is_deleted_through_a_mount_the_agent_left(site: Site) -> None:
    need_root()
    precious = site.root / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    driver = site.driver()
    placement, handle = site.spawn(driver)
    target = site.work() / "mnt"
    target.mkdir()
    subprocess.run(["mount", "--bind", str(precious), str(target)], check=True)
    try:
        with pytest.raises(DriverError, match="still mounted") as kept:
            driver.destroy(VM, placement, handle, NEVER)
        assert kept.value.kind == "still-there"
        assert not alive(handle.data["pid"])
    finally:
        subprocess.run(["umount", str(target)], check=True)
    driver.destroy(VM, placement, handle, NEVER)
    assert (precious / "file").read_text() == "keep"
    (precious / "file").unlink()


def test_a_teardown_called_off_in_its_grace_says_so_and_can_be_tried_again(site: Site) -> None:
    site.configure(stop_grace_s=60)
    site.script("trap '' TERM; echo > ready; while :; do sleep 600 & wait; done")
    driver = site.driver()
    placement, handle = site.spawn(driver)
    site.wait_for("ready")
    abort = threading.Event()
    abort.set()
    with pytest.raises(DriverError) as aborted:
        driver.destroy(VM, placement, handle, abort)
    assert aborted.value.kind == "aborted"
    assert driver.inspect(VM, placement, handle).presence == "running"
    site.configure(stop_grace_s=0.1)
    site.driver().destroy(VM, placement, handle, NEVER)


def test_kept_logs_are_few_and_short(site: Site) -> None:
    site.configure(kept_logs=2, kept_log_bytes=100)
    site.script("yes | head -n 1000; echo end")
    driver = site.driver()
    for n in range(4):
        placement, handle = site.spawn(driver, f"vm-{n}")
        ends = Ends()
        driver.watch(f"vm-{n}", placement, handle, ends)
        ends.wait()
        driver.destroy(f"vm-{n}", placement, handle, NEVER)
    kept = sorted((site.root / "state" / "logs").iterdir())
    assert [path.name for path in kept] == ["vm-2.log", "vm-3.log"]
    assert all(path.stat().st_size == 100 for path in kept)


def test_fifty_at_once_are_all_told_and_leave_nothing(site: Site) -> None:
    site.script(f"trap 'exit 3' USR1; echo > ready; {SLEEP}")
    driver = site.driver()
    vms = [f"vm-{n:02}" for n in range(50)]
    files_before = psutil.Process().num_fds()
    ends = {vm: Ends() for vm in vms}

    def life(vm: str) -> None:
        placement, handle = site.spawn(driver, vm)
        driver.watch(vm, placement, handle, ends[vm])
        site.wait_for("ready", vm)
        if int(vm[-1]) % 2:
            os.kill(handle.data["pid"], signal.SIGUSR1)
            assert ends[vm].wait().exit_code == 3
        driver.destroy(vm, placement, handle, NEVER)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(life, vms))
    assert site.survey(driver) == []
    assert psutil.Process().num_fds() <= files_before + 1
    assert psutil.Process().num_threads() < 10
    site.assert_no_process_is_left()

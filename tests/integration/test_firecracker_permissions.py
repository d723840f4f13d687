"""What the coordinator may not do to a microVM, and how it does it without being root."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.errors import DriverError
from infra.drivers.firecracker import teardown
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from infra.network.commands import Commands
from infra.network.policy import Policy
from tests.integration.firecracker_site import NEVER, UID, Site
from tests.needed import need_packages

VM = "vm-01"
REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65_534


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every signal be refused, as another user's processes do."""

    def refuse(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process, "send", refuse)


def fake_sudo(site: Site, monkeypatch: pytest.MonkeyPatch, refuses: str = "none") -> Path:
    """Put a `sudo` on the path that notes what it is asked, refuses one command, and runs the others."""
    log, folder = site.root / "sudo.log", site.root / "bin"
    folder.mkdir()
    (folder / "sudo").write_text(
        f'#!/bin/sh\necho "$*" >>{log}\n[ "$1" = -n ] || exit 9\nshift\n'
        f'[ "$1" = -u ] && shift 2\n[ "$1" = {refuses} ] && {{ echo "sudo: a password is required" >&2; exit 1; }}\n'
        'exec "$@"\n'
    )
    (folder / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    site.changes["use_sudo"] = True
    return log


@pytest.mark.usefixtures("not_permitted")
def test_a_machine_that_may_not_be_signalled_keeps_its_chroot_and_says_what_is_needed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    with pytest.raises(DriverError, match="CAP_KILL, or set use_sudo") as caught:
        driver.destroy(VM, placement, handle, NEVER)
    assert (caught.value.kind, caught.value.transient) == ("still-there", True)
    assert driver.inspect(VM, placement, handle).presence == "running"
    assert Paths(site.base, VM).chroot.exists()
    assert site.net.released == [], "it has its address as long as it lives"
    monkeypatch.undo()
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


def test_a_user_who_may_not_signal_is_refused_by_the_kernel(site: Site) -> None:
    driver = site.driver()
    _, handle = site.spawn(driver, VM)
    script = (
        "import os, sys\n"
        "pidfd = os.pidfd_open(int(sys.argv[1]))\n"
        "import signal\n"
        "try:\n    signal.pidfd_send_signal(pidfd, signal.SIGKILL)\n"
        "except PermissionError:\n    sys.exit(42)\n"
    )
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", script, str(handle.data["pid"])],
        user=NOBODY,
        check=False,
        timeout=30,
    )
    assert done.returncode == 42
    assert process.stat(handle.data["pid"]) is not None, "EPERM means alive"


@pytest.mark.usefixtures("not_permitted")
def test_with_sudo_it_is_killed_as_its_own_user_and_its_files_are_taken_back_first(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_sudo(site, monkeypatch)
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []
    asked = log.read_text().splitlines()
    paths = Paths(site.base, VM)
    assert asked[0] == f"-n chown {UID}:{UID} {paths.overlay} {paths.vmm_log}"
    loosened = f"-n chmod go+rwX {paths.chroot} {paths.chroot}/run {paths.socket}"
    assert {line for line in asked if "chmod" in line} <= {loosened}, "none where the API answered at once"
    assert paths.directory.parent.stat().st_uid == 0
    assert f"-n -u #{UID} kill -9 {handle.data['pid']}" in asked
    assert asked[-1] == f"-n chown -R 0:0 {paths.directory}"
    assert [line for line in asked if "kernel" in line or "rootfs" in line] == [], (
        "the images keep their owner"
    )


@pytest.mark.usefixtures("not_permitted")
def test_a_sudo_that_may_not_kill_says_the_grant_that_is_missing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sudo(site, monkeypatch, refuses="kill")
    driver = site.driver()
    placement, handle = site.spawn(driver, VM)
    with pytest.raises(DriverError, match=rf"root ALL=\(#{UID}\) NOPASSWD: /usr/bin/kill"):
        driver.destroy(VM, placement, handle, NEVER)
    assert Paths(site.base, VM).chroot.exists()
    os.kill(handle.data["pid"], signal.SIGKILL)
    driver.destroy(VM, placement, handle, NEVER)
    assert site.leftovers() == []


def test_a_process_that_ended_meanwhile_needs_no_signal(site: Site) -> None:
    driver = site.driver()
    _, handle = site.spawn(driver, VM)
    watched = driver._watcher.get(VM)
    assert watched is not None
    os.kill(handle.data["pid"], signal.SIGKILL)
    assert watched.over.wait(10)
    teardown.kill(watched, teardown.Bounds(1, 1, use_sudo=False, uid=UID))


def test_slow_chmods_are_never_two_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sudo(site, monkeypatch)
    running, most = [0], [0]
    real = Commands.run

    def counted(*args: Any, **options: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            return real(*args, **options)
        finally:
            running[0] -= 1

    jailer = site.root / "jailer"
    jailer.write_text("#!/bin/sh\nexec sleep 600\n")
    jailer.chmod(0o755)
    site.changes |= {"jailer_path": str(jailer), "socket_wait_s": 0.5}
    driver = site.driver()
    placement = site.plan(driver, VM)
    monkeypatch.setattr(Commands, "run", counted)
    with suppress(DriverError):
        driver.spawn(site.order(VM, placement), threading.Event())
    monkeypatch.setattr(Commands, "run", real)
    assert most[0] == 1
    driver.destroy(VM, placement, None, NEVER)


JAILER_CAPABILITIES = (
    "cap_sys_chroot,cap_setuid,cap_setgid,cap_sys_admin,cap_mknod,cap_chown,cap_dac_override,cap_fowner+ep"
)
UNPRIVILEGED = """
set -e
mount -t tmpfs -o mode=755 tmpfs /etc/sudoers.d
cat >/etc/sudoers.d/fleetlog <<GRANTS
daemon ALL=(root) NOPASSWD: /usr/bin/chown, /usr/bin/chmod
daemon ALL=(nobody) NOPASSWD: /usr/bin/kill
GRANTS
chmod 440 /etc/sudoers.d/fleetlog
exec setpriv --reuid daemon --regid daemon --clear-groups "$0" -m tests.integration.firecracker_unprivileged
"""


def test_a_coordinator_that_is_not_root_does_all_of_it_with_real_sudo(site: Site) -> None:
    need_packages("sudo", "setcap")
    if not all(parent.stat().st_mode & 0o001 for parent in REPOSITORY.parents):
        pytest.skip(f"{REPOSITORY} cannot be read by another user")
    daemon = pwd.getpwnam("daemon")
    binaries = site.root / "binaries"
    binaries.mkdir()
    config = site.config()
    for source in (config.firecracker_path, config.jailer_path):
        shutil.copy(source, binaries)
    subprocess.run(["setcap", JAILER_CAPABILITIES, binaries / "jailer"], check=True, timeout=30)
    (site.root / "state").mkdir()
    for path in (site.base, site.root / "state", site.kernel, site.rootfs):
        os.chown(path, daemon.pw_uid, daemon.pw_gid)
    site.changes |= {
        "jailer_path": str(binaries / "jailer"),
        "firecracker_path": str(binaries / "firecracker"),
        "use_sudo": True,
        "uid": NOBODY,
        "gid": NOBODY,
    }
    placement = site.plan(site.driver(), VM)
    site.net.attach(site.lease(VM), Policy(), NOBODY, NOBODY)
    told = {"config": msgspec.to_builtins(site.config()), "placement": {**placement, "cgroups": []}, "vm": VM}
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", UNPRIVILEGED, sys.executable],
        cwd=REPOSITORY,
        input=json.dumps(told) + "\n",
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["found"] == ["running", "running"]
    assert "killed after" in said["evidence"]
    site.net.release(site.lease(VM))
    assert site.leftovers() == []
    assert (site.kernel.stat().st_uid, site.rootfs.stat().st_uid) == (daemon.pw_uid, daemon.pw_uid)

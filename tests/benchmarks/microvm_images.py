"""What the machines of the microVM benchmark are made of, the same on every side, and the fleet that starts them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from infra.config.firecracker import FirecrackerLabelSet, FirecrackerScaler
from tests.benchmarks.microvm_raw import MEMORY_MIB, OVERLAY_MIB, UID
from tests.benchmarks.peers.peer import Images
from tests.benchmarks.stage import SCALER, Stage
from tests.guest.binaries import fetch_binaries
from tests.guest.build import build_guest
from tests.guest.halting import write_halting_kernel

STILL, GUEST = ("still",), ("guest",)
"""Machines that halt at once, so that the host is measured and not its emulation of guests; and agents."""

_ROOTFS_BYTES = 16 << 20
_FOLDERS = ("bin", "dev", "etc", "proc", "root", "run", "sbin", "sys", "tmp", "usr/local/bin", "var/lib")
"""Of the root file system: a peer puts its agent there. The guest never looks."""


def make_images(stage: Stage) -> Images:
    """Return them, made in this run's folder or kept from another run."""
    kernel = write_halting_kernel(stage.root / "halt.elf")
    return Images(fetch_binaries(), kernel, _make_rootfs(stage.root / "rootfs.ext4"), MEMORY_MIB)


def scaler_of(images: Images, base: Path) -> FirecrackerScaler:
    """Return a scaler of such machines, whose chroots are below `base`."""
    rest: dict[str, Any] = {"rootfs_path": str(images.rootfs), "overlay_mib": OVERLAY_MIB}
    guest = FirecrackerLabelSet(
        labels=GUEST, kernel_path=str(build_guest()), env={"GUEST_TEST": "wait"}, **rest
    )
    return FirecrackerScaler(
        name=SCALER,
        backend="firecracker",
        max_agents=250,
        max_concurrent_spawns=250,
        register_timeout_s=3600,
        heartbeat_grace_s=3600,
        stop_grace_s=0,
        firecracker_path=str(images.binaries.firecracker),
        jailer_path=str(images.binaries.jailer),
        kernel_path=str(images.kernel),
        uid=UID,
        gid=UID,
        chroot_base=str(base),
        vcpus=1,
        mem_mib=images.memory_mib,
        label_sets=(FirecrackerLabelSet(labels=STILL, **rest), guest),
    )


def _make_rootfs(path: Path) -> Path:
    with path.open("xb") as file:
        file.truncate(_ROOTFS_BYTES)
    with tempfile.TemporaryDirectory() as tree:
        for folder in _FOLDERS:
            (Path(tree) / folder).mkdir(parents=True)
        command = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", tree, str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    return path

"""What this host lacks to run a scaler's microVMs, all of it at once, before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from actors.errors import DriverError
from infra.drivers.firecracker import images, overlay, paths
from infra.drivers.firecracker.config import FirecrackerConfig

DEVICES = {
    "/dev/kvm": "load the kvm module, or run where hardware virtualisation is passed on",
    "/dev/net/tun": "modprobe tun",
}


def missing(config: FirecrackerConfig, devices: dict[str, str] | None = None) -> tuple[str, ...]:
    """Return what is missing or wrong, each with its way out; empty when all is there."""
    return tuple(dict.fromkeys(_missing(config, DEVICES if devices is None else devices)))


def _missing(config: FirecrackerConfig, devices: dict[str, str]) -> Iterator[str]:
    yield from _said(partial(images.check_program, config.firecracker_path, "firecracker_path"))
    yield from _said(partial(images.check_program, config.jailer_path, "jailer_path"))
    name = Path(os.path.realpath(config.firecracker_path)).name
    if name != paths.BINARY:
        yield (
            f"firecracker_path {config.firecracker_path} leads to a file called {name!r}: the jailer names directories "
            f"by it, so it must be called {paths.BINARY}"
        )
    for label_set in config.label_sets:
        kernel, rootfs = label_set.kernel_path or config.kernel_path, label_set.rootfs_path
        yield from _said(partial(images.check_kernel, kernel, config.uid, config.gid))
        yield from _said(partial(images.check_rootfs, rootfs, config.uid, config.gid))
    for device, way_out in devices.items():
        if not Path(device).exists():
            yield f"there is no {device}: {way_out}"
    if shutil.which(overlay.FORMATTER) is None:
        yield f"{overlay.FORMATTER} is not installed: apt-get install e2fsprogs"
    if config.use_sudo and shutil.which("sudo") is None:
        yield "sudo is not installed, and use_sudo asks for it: apt-get install sudo"


def _said(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except DriverError as error:
        yield str(error)

"""This host: disk, cgroups, and the programs a fleet file names."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.config.bare_metal import BareMetalLabelSet
from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.doctor.check import Check, fail, good, warn
from infra.drivers.catalogue import firecracker_config
from infra.drivers.firecracker import preflight
from infra.host_process.cgroup import Mount

_DISK_WARN_BYTES = 2 << 30
_DISK_FAIL_BYTES = 200 << 20


def check_disk(directory: Path) -> Check:
    """Look at the disk the data directory is on, or would be."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return warn("disk", f"{there}: {error.strerror}", "run doctor as the data directory's owner")
    detail = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB free at {directory}"
    todo = "free some: a full disk stops the log, and with it the fleet"
    if usage.free < _DISK_FAIL_BYTES:
        return fail("disk", detail, todo)
    if usage.free < _DISK_WARN_BYTES:
        return warn("disk", detail, todo)
    return good("disk", detail)


def check_cgroups(found: Sequence[Mount], own: str | None, *, root: bool) -> Check:
    """Tell whether agents on this host can have a cgroup v2 of their own; `own` is our place in the hierarchy."""
    todo = "run as root, or let systemd delegate with `Delegate=yes`: else only the process group is ended for sure"
    for mount in found:
        place = mount.at(mount.root if root else own or "")
        if place is not None and os.access(place, os.W_OK):
            return good("cgroups", f"v2 at {place}, writable")
    if root and not found:
        return good("cgroups", "no v2 is mounted; a coordinator that runs as root mounts one of its own")
    if not found:
        return warn("cgroups", "no cgroup v2 is mounted, and only root can mount one", todo)
    return warn("cgroups", f"v2 at {found[0].point}, and we may not write to our place in it", todo)


def check_programs(config: FleetConfig) -> Iterator[Check]:
    """Look for the programs that label sets start, and for all that microVMs need."""
    for scaler in config.scalers:
        if isinstance(scaler, FirecrackerScaler):
            yield _microvms(scaler)
        for index, label_set in enumerate(scaler.label_sets):
            if not isinstance(label_set, BareMetalLabelSet):
                continue
            name = f"program of {scaler.name}[{index}]"
            path = Path(label_set.binary_path)
            if not path.is_file():
                yield fail(name, f"{path} is not there", "install it, or name another in binary_path")
            elif not os.access(path, os.X_OK):
                yield fail(name, f"{path} is not executable", f"chmod +x {path}")
            else:
                yield good(name, str(path))


def _microvms(scaler: FirecrackerScaler) -> Check:
    name = f"microVMs of {scaler.name}"
    settings = firecracker_config(scaler, owner="doctor", state=Path("/"), environment={}, host_access=())
    lacking = preflight.missing(settings)
    if lacking:
        return fail(name, "; ".join(lacking), "put that right: until then its spawns fail")
    return good(name, "binaries, images, devices and tools are there")

"""This host: disk, cgroups, and the programs a fleet file names."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from infra.config.bare_metal import BareMetalLabelSet
from infra.config.fleet import FleetConfig
from infra.doctor.check import Check, fail, good, warn

_DISK_WARN_BYTES = 2 << 30
_DISK_FAIL_BYTES = 200 << 20
_CGROUPS = Path("/sys/fs/cgroup")


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


def check_cgroups(root: Path = _CGROUPS) -> Check:
    """Look whether agents on this host can have a cgroup v2 of their own."""
    own = next((place for place in (root, root / "unified") if (place / "cgroup.controllers").exists()), None)
    todo = "without one only the process group is ended for sure; mount cgroup v2 writable, or run as root"
    if own is None:
        return warn("cgroups", f"no cgroup v2 at {root}", todo)
    if not os.access(own, os.W_OK):
        return warn("cgroups", f"cgroup v2 at {own} cannot be written by us", todo)
    return good("cgroups", f"v2 at {own}, writable")


def check_programs(config: FleetConfig) -> Iterator[Check]:
    """Look for the programs that label sets start."""
    for scaler in config.scalers:
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

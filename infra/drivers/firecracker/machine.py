"""What a microVM is: its size, its devices, and how its kernel is told."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

from actors.decisions.addresses import Lease
from actors.errors import DriverError
from events.envelope import Resources
from infra.drivers.firecracker import metadata
from infra.drivers.firecracker.api import Request
from infra.drivers.firecracker.config import VCPUS_MOST, FirecrackerConfig, LabelSet

log = logging.getLogger(__name__)
MIB = 1024 * 1024
BOOT_ARGS_BYTES_MOST = 2047
INTERFACE = "eth0"
BOOT_ARGS = "console=ttyS0 reboot=k panic=1 random.trust_cpu=on init=/init"
"""Without trust in the CPU's randomness a minimal guest waits for entropy, and every TLS call with it."""


class Size(NamedTuple):
    """vCPUs and memory."""

    vcpus: int
    mem_mib: int


def size(limits: Resources, label_set: LabelSet, config: FirecrackerConfig) -> Size:
    """Return the size: the limits' where declared, else the label set's, else the scaler's.

    CPUs round up, memory down to whole MiB; less than one MiB counts as undeclared.

    Raises:
        DriverError: more vCPUs than Firecracker has.
    """
    vcpus = math.ceil(limits.cpus) or label_set.vcpus or config.vcpus
    mem_mib = limits.memory_bytes // MIB or label_set.mem_mib or config.mem_mib
    if limits.cpus not in (0, vcpus) or limits.memory_bytes not in (0, mem_mib * MIB):
        log.debug("limits %s become %d vCPUs and %d MiB", limits, vcpus, mem_mib)
    if vcpus > VCPUS_MOST:
        raise DriverError(
            "refused", f"{vcpus} vCPUs: Firecracker gives a machine at most {VCPUS_MOST}", transient=False
        )
    return Size(vcpus, mem_mib)


def boot_args(lease: Lease, more: str = "") -> str:
    """Return the kernel's command line, with the machine's address fixed.

    Raises:
        DriverError: longer than Firecracker takes.
    """
    address = f"ip={lease.address}::{lease.gateway}:{lease.netmask}::{INTERFACE}:off"
    line = " ".join(part for part in (BOOT_ARGS, address, more) if part)
    if len(line.encode()) > BOOT_ARGS_BYTES_MOST:
        raise DriverError(
            "refused",
            f"boot_args of {len(line.encode())} bytes: at most {BOOT_ARGS_BYTES_MOST}",
            transient=False,
        )
    return line


def requests(sized: Size, line: str, lease: Lease, document: dict[str, Any]) -> list[Request]:
    """Return the configuration, all before the start; paths as Firecracker sees them in its chroot."""
    put = "PUT"
    return [
        Request(
            put, "/machine-config", {"vcpu_count": sized.vcpus, "mem_size_mib": sized.mem_mib, "smt": False}
        ),
        Request(put, "/boot-source", {"kernel_image_path": "/kernel", "boot_args": line}),
        Request(put, "/drives/rootfs", _drive("rootfs", root=True, read_only=True)),
        Request(put, "/drives/overlay", _drive("overlay", root=False, read_only=False)),
        Request(
            put,
            f"/network-interfaces/{INTERFACE}",
            {"iface_id": INTERFACE, "guest_mac": lease.mac, "host_dev_name": lease.tap},
        ),
        Request(
            put,
            "/mmds/config",
            {"version": "V2", "network_interfaces": [INTERFACE], "ipv4_address": metadata.ADDRESS},
        ),
        Request(put, "/mmds", document),
    ]


def _drive(name: str, *, root: bool, read_only: bool) -> dict[str, Any]:
    return {
        "drive_id": name,
        "path_on_host": f"/{name}.ext4",
        "is_root_device": root,
        "is_read_only": read_only,
    }

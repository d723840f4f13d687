"""What tests need of the host: root, kernel devices, and Debian packages, each asked for by name."""

import os
import shutil
from pathlib import Path

import pytest

PACKAGES = {
    "bridge": "iproute2",
    "gcc": "gcc",
    "ip": "iproute2",
    "ld": "binutils",
    "mkfs.ext4": "e2fsprogs",
    "nft": "nftables",
}
"""Commands microVM tests run, and the Debian package that brings each."""

_MORE = {"setcap": "libcap2-bin", "sudo": "sudo", "sysctl": "procps"}
"""What single tests need besides: see `need_packages`."""


def need_firecracker_host() -> None:
    """Skip without the kernel's devices; skip, or fail where FLEETLOG_REQUIRE says so, without root or a package."""
    need_devices("/dev/kvm", "/dev/net/tun")
    need_root()
    need_packages(*PACKAGES)


def need_devices(*devices: str) -> None:
    """Skip without these devices: no installation brings them."""
    for device in devices:
        if not Path(device).exists():
            pytest.skip(f"this kernel has no {device}, which this test needs")


def need_root() -> None:
    """Skip, or fail where FLEETLOG_REQUIRE names root, without root."""
    if os.geteuid() != 0:
        _lack("root", "this test needs root")


def need_packages(*commands: str) -> None:
    """Skip, or fail where FLEETLOG_REQUIRE says so, without the packages that bring these commands."""
    packages = {**PACKAGES, **_MORE}
    missing = sorted({packages[command] for command in commands if shutil.which(command) is None})
    if missing:
        _lack("packages", f"missing: apt-get install {' '.join(missing)}")


def _lack(what: str, message: str) -> None:
    required = os.environ.get("FLEETLOG_REQUIRE", "").split(",")
    (pytest.fail if what in required else pytest.skip)(message)

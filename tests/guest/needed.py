"""What these tests need of the host: root, kernel devices, and Debian packages, each asked for by name."""

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
"""Commands, and the Debian package that brings each."""

_MORE = {"setcap": "libcap2-bin", "sudo": "sudo"}
"""What single tests need besides: see `need_packages`."""

_DEVICES = ("/dev/kvm", "/dev/net/tun")


def need_firecracker_host() -> None:
    """Skip without the kernel's devices; skip, or fail where FLEETLOG_REQUIRE says so, without root or a package."""
    for device in _DEVICES:
        if not Path(device).exists():
            pytest.skip(f"this kernel has no {device}: no microVM can run here")
    if os.geteuid() != 0:
        _lack("root", "microVMs with a network need root")
    need_packages(*PACKAGES)


def need_packages(*commands: str) -> None:
    """Skip, or fail where FLEETLOG_REQUIRE says so, without the packages that bring these commands."""
    packages = {**PACKAGES, **_MORE}
    missing = sorted({packages[command] for command in commands if shutil.which(command) is None})
    if missing:
        _lack("packages", f"missing: apt-get install {' '.join(missing)}")


def _lack(what: str, message: str) -> None:
    required = os.environ.get("FLEETLOG_REQUIRE", "").split(",")
    (pytest.fail if what in required else pytest.skip)(message)

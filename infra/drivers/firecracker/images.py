"""Kernels and root file systems, looked at before anything is made: a clear refusal instead of a guest that never boots."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

from actors.errors import DriverError

EXT4_MAGIC = 0xEF53
EXT4_MAGIC_OFFSET = 1024 + 0x38
_SUPERBLOCK_OFFSET = 1024
_SUPERBLOCK_BYTES = 1024
_ELF = b"\x7fELF"
_ARM_IMAGE_MAGIC = b"ARM\x64"
_ARM_IMAGE_MAGIC_OFFSET = 56
_HEAD_BYTES = 64
_64BIT = 0x80


def check_program(path: str, key: str) -> None:
    """Have a program we may execute at `path`, which the configuration gave as `key`.

    Raises:
        DriverError: there is none; not transient.
    """
    found = _stat(path, key)
    if not stat.S_ISREG(found.st_mode) or not os.access(path, os.X_OK):
        raise DriverError(
            "refused", f"{key} {path} is not a program we may execute: chmod +x it", transient=False
        )


def check_kernel(path: str, uid: int, gid: int) -> None:
    """Have a kernel Firecracker can load: an uncompressed ELF, or an arm64 Image.

    Raises:
        DriverError: missing, of another form, or unreadable for the jailed user; not transient.
    """
    head = _head(path, "kernel_path", uid, gid, _HEAD_BYTES)
    arm = head[_ARM_IMAGE_MAGIC_OFFSET : _ARM_IMAGE_MAGIC_OFFSET + 4] == _ARM_IMAGE_MAGIC
    if not head.startswith(_ELF) and not arm:
        raise DriverError(
            "refused",
            f"kernel_path {path} is no ELF file: give an uncompressed vmlinux, not a bzImage",
            transient=False,
        )


def check_rootfs(path: str, uid: int, gid: int) -> None:
    """Have a root file system that is whole, as far as it says how long it is.

    Raises:
        DriverError: missing, empty, shorter than its own superblock says, or unreadable; not transient.
    """
    head = _head(path, "rootfs_path", uid, gid, _SUPERBLOCK_OFFSET + _SUPERBLOCK_BYTES)
    length = Path(path).stat().st_size
    wanted = ext4_bytes(head)
    if length == 0 or (wanted is not None and length < wanted):
        raise DriverError(
            "refused",
            f"rootfs_path {path} is truncated: {length} bytes of {wanted or 'an image'}; build or copy it again",
            transient=False,
        )


def ext4_bytes(head: bytes) -> int | None:
    """Return how long an ext4 file system says it is, by the first 2 KiB of it; None when it is none."""
    if len(head) < EXT4_MAGIC_OFFSET + 2 or head[EXT4_MAGIC_OFFSET : EXT4_MAGIC_OFFSET + 2] != struct.pack(
        "<H", EXT4_MAGIC
    ):
        return None
    block = head[_SUPERBLOCK_OFFSET : _SUPERBLOCK_OFFSET + _SUPERBLOCK_BYTES].ljust(_SUPERBLOCK_BYTES, b"\0")

    def number(offset: int) -> int:
        return int.from_bytes(block[offset : offset + 4], "little")

    blocks = number(0x04) | (number(0x150) << 32 if number(0x60) & _64BIT else 0)
    return blocks << (10 + min(number(0x18), 16))


def _head(path: str, key: str, uid: int, gid: int, length: int) -> bytes:
    found = _stat(path, key)
    if not stat.S_ISREG(found.st_mode):
        raise DriverError("refused", f"{key} {path} is not a file", transient=False)
    if not readable_by(found, uid, gid):
        raise DriverError(
            "refused",
            f"{key} {path} cannot be read by uid {uid}, as which Firecracker runs: chmod a+r it",
            transient=False,
        )
    try:
        with Path(path).open("rb") as file:
            return file.read(length)
    except OSError as error:
        raise DriverError(
            "refused", f"{key} {path} cannot be read by us: {error.strerror}", transient=False
        ) from error


def readable_by(found: os.stat_result, uid: int, gid: int) -> bool:
    """Tell whether a user without capabilities may read a file."""
    if uid == found.st_uid:
        return bool(found.st_mode & stat.S_IRUSR)
    if gid == found.st_gid:
        return bool(found.st_mode & stat.S_IRGRP)
    return bool(found.st_mode & stat.S_IROTH)


def _stat(path: str, key: str) -> os.stat_result:
    try:
        return Path(path).stat()
    except OSError as error:
        raise DriverError(
            "missing",
            f"{key} {path}: {(error.strerror or str(error)).lower()}; correct {key} or install it",
            transient=False,
        ) from error

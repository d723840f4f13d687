"""Where one microVM's files are, on the host and as Firecracker sees them.

    <chroot_base>/firecracker/<vm>/mark.json     whose it is; there from the directory's first moment on
                                   serial.log    what the guest writes; serial.offset: how far that was passed on
                                   vmm.log       what Firecracker writes of itself; vmm.offset likewise
                                   stderr.log    what the jailer, or a panicking Firecracker, said last
                                   root/         the jailer's chroot: kernel, rootfs.ext4, overlay.ext4, vmm.log (the
                                                 same file), firecracker.pid, run/api.sock, dev/, firecracker
    <chroot_base>/firecracker/.overlay-templates/overlay-<MiB>mib.ext4

The middle part is the base name of the binary: the jailer derives it, and the pid file's name, from there. The logs'
own names are outside the chroot, so that a broken-out Firecracker cannot make us follow a link of its own.
"""

from __future__ import annotations

from pathlib import Path

from actors.errors import DriverError
from events.subjects import VM_ID

BINARY = "firecracker"
SOCKET_PATH_BYTES_MOST = 107
"""Of a Unix socket's path, without the zero that ends it."""

API_SOCKET = "run/api.sock"
TEMPLATES = ".overlay-templates"
ID_LENGTH = 28
"""Of the ids fleetlog makes."""


class Paths:
    """One microVM's files."""

    def __init__(self, chroot_base: str | Path, vm: str) -> None:
        assert VM_ID.fullmatch(vm), f"one path segment, not {vm!r}"
        self.vm = vm
        self.directory = Path(chroot_base) / BINARY / vm
        self.chroot = self.directory / "root"
        self.mark = self.directory / "mark.json"
        self.serial_log = self.directory / "serial.log"
        self.serial_offset = self.directory / "serial.offset"
        self.vmm_log = self.directory / "vmm.log"
        self.vmm_offset = self.directory / "vmm.offset"
        self.stderr_log = self.directory / "stderr.log"
        self.kernel = self.chroot / "kernel"
        self.rootfs = self.chroot / "rootfs.ext4"
        self.overlay = self.chroot / "overlay.ext4"
        self.jailed_vmm_log = self.chroot / "vmm.log"
        self.pid_file = self.chroot / f"{BINARY}.pid"
        self.socket = self.chroot / API_SOCKET


def machines(chroot_base: str | Path) -> Path:
    """Return the directory that holds one directory per microVM."""
    return Path(chroot_base) / BINARY


def is_vm(name: str) -> bool:
    """Tell whether a name in there is a microVM's: one segment, none of ours that begin with a dot."""
    return VM_ID.fullmatch(name) is not None


def template(chroot_base: str | Path, mib: int) -> Path:
    """Return the overlay template of this size."""
    return machines(chroot_base) / TEMPLATES / f"overlay-{mib}mib.ext4"


def socket_length(chroot_base: str | Path, id_length: int = ID_LENGTH) -> int:
    """Return the bytes of the API socket's path for ids of this length."""
    return len(str(Paths(chroot_base, "x" * id_length).socket).encode())


def of(chroot_base: str | Path, vm: str) -> Paths:
    """Return the paths of a machine.

    Raises:
        DriverError: the id is none, or the socket's path is longer than the kernel allows; not transient.
    """
    if not VM_ID.fullmatch(vm):
        raise DriverError(
            "refused",
            f"{vm!r} is no VM id: lowercase letters, digits and dashes, at most 64",
            transient=False,
        )
    found = Paths(chroot_base, vm)
    length = len(str(found.socket).encode())
    if length > SOCKET_PATH_BYTES_MOST:
        raise DriverError(
            "refused",
            f"the API socket {found.socket} would be {length} bytes long, the kernel takes {SOCKET_PATH_BYTES_MOST}: "
            "give a shorter chroot_base",
            transient=False,
        )
    return found

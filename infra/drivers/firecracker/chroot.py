"""One microVM's directory: made whole with its mark, filled with links and its own drive, taken away when it is over.

Kernel and rootfs are hard links and never change owner: a chown would follow the link to everybody's image, and the
next link of it would be refused. What is the machine's own (its drive, Firecracker's log) belongs to the jailed user.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.firecracker import overlay
from infra.drivers.firecracker.paths import Paths
from infra.host_process.files import mounts_below
from infra.network.commands import Commands

_REMOVE_TIMEOUT_S = 30.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Whose directory this is, and the whole placement: enough for a teardown where no log can be asked."""

    vm: str
    owner: str
    scaler: str
    placement: dict[str, Any]
    version: int = 1


class Chroot:
    """One machine's files; any part may be missing. `sudo`: what root must do goes through it."""

    def __init__(self, paths: Paths, uid: int, gid: int, *, sudo: bool) -> None:
        self.paths = paths
        self._uid = uid
        self._gid = gid
        self._sudo = sudo

    @property
    def _unborn(self) -> Path:
        return self.paths.directory.with_name(f".new-{self.paths.vm}")

    def create(self, mark: Mark) -> None:
        """Make the directory, complete with its mark, its logs and an empty chroot, or not at all.

        Raises:
            DriverError: it is there already, or there is no room or no right.
        """
        directory = self.paths.directory
        try:
            if directory.exists():
                raise DriverError("refused", f"{directory} exists: ids are never reused", transient=False)
            directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._unborn.mkdir(mode=0o700)
            (self._unborn / self.paths.chroot.name).mkdir(mode=0o700)
            (self._unborn / self.paths.mark.name).write_bytes(msgspec.json.encode(mark))
            for log in (self.paths.serial_log, self.paths.stderr_log, self.paths.vmm_log):
                mode = 0o644 if log == self.paths.vmm_log else 0o600
                os.close(os.open(self._unborn / log.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            self._unborn.rename(directory)
        except OSError as error:
            raise _no_room(directory, error) from error

    def fill(self, kernel: str, rootfs: str, template: Path, abort: Abort) -> None:
        """Put the images and the drive in.

        Raises:
            DriverError: they cannot be put there, or it was called off.
        """
        self._place(kernel, self.paths.kernel, abort)
        self._place(rootfs, self.paths.rootfs, abort)
        overlay.copy(template, self.paths.overlay, abort)
        try:
            self.paths.overlay.chmod(0o600)
            os.link(self.paths.vmm_log, self.paths.jailed_vmm_log)
            if not self._sudo:
                for own in (self.paths.overlay, self.paths.vmm_log):
                    os.chown(own, self._uid, self._gid)
                return
        except OSError as error:
            raise _no_room(self.paths.directory, error) from error
        owner = f"{self._uid}:{self._gid}"
        Commands(sudo=True).run("chown", owner, str(self.paths.overlay), str(self.paths.vmm_log))

    def loosen(self) -> None:
        """Let us reach the API socket, as far as it is there: the jailer keeps what it makes from everybody else.

        To connect is to write. It opens nothing to others: the directory above the chroot is ours alone.
        """
        way = (self.paths.chroot, self.paths.socket.parent, self.paths.socket)
        with suppress(DriverError):
            Commands(sudo=True).run("chmod", "go+rwX", *map(str, way), timeout_s=5)

    def exists(self) -> bool:
        """Tell whether any trace of it is there."""
        return self.paths.directory.exists() or self._unborn.exists()

    def mark(self) -> Mark | None:
        """Return whose it is, None when it does not say."""
        for directory in (self.paths.directory, self._unborn):
            with suppress(OSError, msgspec.MsgspecError):
                return msgspec.json.decode((directory / self.paths.mark.name).read_bytes(), type=Mark)
        return None

    def remove(self) -> None:
        """Take it all away. Only for a machine that is proven not to run.

        Raises:
            DriverError: some of it is left.
        """
        try:
            for directory in (self._unborn, self.paths.directory):
                if not directory.exists():
                    continue
                if self._sudo:
                    with suppress(DriverError):
                        own = f"{os.geteuid()}:{os.getegid()}"
                        Commands(sudo=True).run(
                            "chown", "-R", own, str(directory), timeout_s=_REMOVE_TIMEOUT_S
                        )
                inside = mounts_below(directory)
                if inside:
                    raise DriverError(
                        "still-there",
                        f"{inside[0]} is mounted there; unmount it, it is not deleted through",
                        transient=True,
                    )
                shutil.rmtree(directory)
        except OSError as error:
            raise DriverError(
                "still-there", f"{self.paths.directory} cannot be removed: {error}", transient=True
            ) from error

    def _place(self, source: str, target: Path, abort: Abort) -> None:
        """Link a file in; copy it only from another file system."""
        origin = os.path.realpath(source)
        try:
            os.link(origin, target)
        except OSError as error:
            if error.errno == errno.EXDEV:
                overlay.copy(Path(origin), target, abort, timeout_s=300)
                with suppress(OSError):
                    target.chmod(0o644)
                return
            if error.errno in (errno.EPERM, errno.EACCES):
                raise DriverError(
                    "refused",
                    f"{source} cannot be linked into {target.parent}: {error.strerror}; it must belong to the "
                    "coordinator's user, or be writable by it (fs.protected_hardlinks)",
                    transient=False,
                ) from error
            if error.errno == errno.ENOENT:
                raise DriverError(
                    "missing", f"{source} does not exist (any more)", transient=False
                ) from error
            raise _no_room(target, error) from error


def _no_room(path: Path, error: OSError) -> DriverError:
    refused = error.errno in (errno.EPERM, errno.EACCES, errno.EROFS)
    return DriverError(
        "refused" if refused else "exhausted", f"{path} cannot be made: {error}", transient=not refused
    )

"""One process at a time sweeps a folder under a coordinator's name: the lock ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from actors.errors import DriverError


class OwnerLock:
    """The right to take away what bears `owner`'s name in `folder`.

    What looks dead there may be coming up just now, in another process of the same name: with another data directory,
    say. So it is taken before anything is listed, and a coordinator keeps it while it runs.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.path = folder / f".fleetlog-owner-{owner}"
        self._owner = owner
        self._descriptor = -1

    def hold(self) -> None:
        """Take it, or keep it. Repeatable.

        Raises:
            DriverError: another process has it, or the folder cannot be written.
        """
        if self._descriptor >= 0:
            return
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise DriverError(
                "refused",
                f"{self.path} cannot be locked: {error.strerror}; nothing there is swept",
                transient=True,
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise DriverError(
                "refused",
                f"another process named {self._owner} uses {self.path.parent} (it holds {self.path.name}): stop it, or "
                "give each coordinator its own --id",
                transient=True,
            ) from error
        self._descriptor = descriptor

    def close(self) -> None:
        """Let go of it; the file stays. Repeatable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

"""The folder a coordinator owns: made private, used by one coordinator at a time, and how the CLI finds it."""

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from infra.embedded.errors import DataDirectoryRefused
from infra.embedded.files import write_private
from infra.embedded.process import start_ticks


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the coordinator that runs on a data directory."""

    coordinator: str
    pid: int
    start_ticks: int
    nats_url: str
    nats_creds: str | None = None
    postgres_dsn: str | None = None
    http_address: str | None = None


class DataDirectory:
    """A data directory held exclusively until `close`.

    Made with mode 0700 when absent. An existing folder keeps its mode and is refused when it is not ours or
    when others may write in it. While one coordinator holds it, a second is refused with its pid.
    The lock ends with the process, however it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        try:
            self._make_or_check()
            self._lock = self._take_lock()
        except OSError as error:
            raise DataDirectoryRefused(
                f"data directory {self.path} cannot be used: {error.strerror or error}; make it ours to write in, "
                "or choose another with --data-dir"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the runtime file and let go of the folder; again is harmless."""
        if self._lock < 0:
            return
        self._runtime_path(self.path).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def publish_runtime(
        self,
        *,
        coordinator: str,
        nats_url: str,
        nats_creds: Path | None = None,
        postgres_dsn: str | None = None,
        http_address: str | None = None,
    ) -> Runtime:
        """Say, in `runtime.json` (mode 0600), how to reach this coordinator."""
        pid = os.getpid()
        runtime = Runtime(
            coordinator=coordinator,
            pid=pid,
            start_ticks=start_ticks(pid) or 0,
            nats_url=nats_url,
            nats_creds=None if nats_creds is None else str(nats_creds),
            postgres_dsn=postgres_dsn,
            http_address=http_address,
        )
        write_private(self._runtime_path(self.path), msgspec.json.encode(runtime).decode())
        return runtime

    @classmethod
    def running(cls, path: Path) -> Runtime | None:
        """Return the coordinator running on `path`, None when there is none (a killed one's file is stale)."""
        try:
            runtime = msgspec.json.decode(cls._runtime_path(path.expanduser()).read_bytes(), type=Runtime)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DataDirectoryRefused(f"{cls._runtime_path(path)} cannot be read: {error}") from error
        return runtime if start_ticks(runtime.pid) == runtime.start_ticks else None

    @staticmethod
    def _runtime_path(path: Path) -> Path:
        return path / "runtime.json"

    def _make_or_check(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            found = self.path.stat()
            if not stat.S_ISDIR(found.st_mode):
                raise DataDirectoryRefused(f"data directory {self.path} is not a folder") from None
            if found.st_uid != os.geteuid():
                raise DataDirectoryRefused(
                    f"data directory {self.path} belongs to user {found.st_uid} and we are {os.geteuid()}: "
                    "run as its owner or choose another with --data-dir"
                ) from None
            if found.st_mode & 0o022:
                raise DataDirectoryRefused(
                    f"data directory {self.path} can be written by other users: `chmod 700` it, "
                    "or choose another with --data-dir"
                ) from None

    def _take_lock(self) -> int:
        path = self.path / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise DataDirectoryRefused(
                f"data directory {self.path} is in use by the coordinator with pid {holder}: "
                "stop it first, or choose another with --data-dir"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            self._runtime_path(self.path).unlink()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

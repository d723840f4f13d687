"""One server process of ours: started when it answers, watched, restarted when it dies, stopped when asked.

A server is not tied to our life. After `kill -9` of the coordinator it runs on, with its clients, until the next
start stops it in good order and starts its own: two servers never share one store, because the server holds
(inherited from us) the lock on its folder for as long as any process of it lives.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from infra.embedded.errors import ServerFailed
from infra.embedded.process import processes_marked, signal_marked, try_lock

_LOG = logging.getLogger("fleetlog.embedded")
_POLL_S = 0.02
_WATCH_S = 1.0
_KILL_TIMEOUT_S = 10.0


class Server(Protocol):
    """What differs between servers."""

    name: str
    lock_path: Path
    mark: str
    """In the command line of the server's first process, and of no other."""
    family_mark: str
    """In the command line of every process of the server, and of no other's."""
    stop_signal: signal.Signals
    start_timeout_s: float
    stop_timeout_s: float

    @property
    def user(self) -> int:
        """The user id it runs as."""

    def launch(self, lock: int) -> subprocess.Popen[bytes]:
        """Start the process, handing it the lock; ServerFailed when it is plain that it cannot run."""

    def probe(self) -> None:
        """Return when the server does its work; raise OSError or ServerFailed while it does not."""

    def last_words(self) -> str:
        """Return where the logs are and how they end, for an error message."""

    def trim_logs(self) -> None:
        """Keep the logs within their bound; called about once a second."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How a server that died by itself comes back: delays double from the first to the longest."""

    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    attempts_max: int = 60
    """Deaths in a row before giving up; a server that lived for `settled_s` starts the count again."""
    settled_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a server is, for `doctor` and metrics."""

    running: bool
    restarts: int
    trouble: str | None


class ServerProcess:
    """Runs a Server. Thread safe; `start` and `stop` may be repeated."""

    def __init__(
        self, server: Server, *, restart: RestartPolicy | None = None, supervised: bool = True
    ) -> None:
        self._server = server
        self._restart = restart or RestartPolicy()
        self._supervised = supervised
        self._mutex = threading.RLock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._restarts = 0
        self._trouble: str | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process, None when it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def status(self) -> Status:
        """How the server is at this moment."""
        return Status(running=self.pid is not None, restarts=self._restarts, trouble=self._trouble)

    def start(self) -> None:
        """Start the server and return when it answers; ServerFailed, with its log's tail, when it does not.

        A server left behind by an earlier run is stopped first, in good order.
        """
        with self._mutex:
            if self.pid is not None:
                return
            self._stopping.clear()
            self._start_once()
            if self._supervised and (self._watcher is None or not self._watcher.is_alive()):
                self._watcher = threading.Thread(
                    target=self._watch, name=f"embedded-{self._server.name}", daemon=True
                )
                self._watcher.start()

    def stop(self) -> None:
        """Stop the server in good order, by force when it takes too long; return when it is gone."""
        self._stopping.set()
        with self._mutex:
            process, self._process = self._process, None
            if process is not None:
                _end(process, self._server.stop_signal, self._server.stop_timeout_s)
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.join()

    def restart(self) -> None:
        """Stop the server if it runs and start it again on the same data."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server process as `kill -9` does; a supervised one comes back. For tests and drills."""
        with self._mutex:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start_once(self) -> None:
        lock = self._take_over()
        try:
            process = self._server.launch(lock)
        except OSError as error:
            raise ServerFailed(f"{self._server.name} cannot be started: {error}") from error
        finally:
            os.close(lock)  # the server has its own copy
        try:
            self._wait_for_answer(process)
        except BaseException:
            _end(process, self._server.stop_signal, self._server.stop_timeout_s)
            raise
        self._process = process

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> None:
        server = self._server
        deadline = time.monotonic() + server.start_timeout_s
        trouble = "no answer yet"
        while time.monotonic() < deadline:
            if self._stopping.is_set():
                raise ServerFailed(f"{server.name} was stopped while it started")
            if (status := process.poll()) is not None:
                raise ServerFailed(
                    f"{server.name} ended while it started ({_said(status)}); {server.last_words()}"
                )
            try:
                server.probe()
            except (OSError, ServerFailed) as error:
                trouble = str(error)
                self._stopping.wait(_POLL_S)
            else:
                return
        raise ServerFailed(
            f"{server.name} did not answer within {server.start_timeout_s:g} s ({trouble}); "
            f"{server.last_words()}"
        )

    def _take_over(self) -> int:
        """Return the folder's lock once no process of an earlier run of the server is left."""
        server = self._server
        if (lock := try_lock(server.lock_path)) is not None:
            return lock
        # First in good order and only the server itself: its children end with it, and those whose server is dead
        # are ending. What is left after that is killed.
        for mark, number, patience_s in (
            (server.mark, server.stop_signal, server.stop_timeout_s),
            (server.family_mark, signal.SIGKILL, _KILL_TIMEOUT_S),
        ):
            found = processes_marked(mark, server.user)
            for pid in found:
                if signal_marked(pid, mark, number):
                    _LOG.warning("%s of an earlier run, pid %d, is sent %s", server.name, pid, number.name)
            if number == signal.SIGKILL and not found:
                break
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if (lock := try_lock(server.lock_path)) is not None:
                    return lock
                time.sleep(_POLL_S)
        raise ServerFailed(
            f"another process holds {server.lock_path}, so {server.name} may still run on this data, and none we "
            f"could stop was found: see who has it with `fuser {server.lock_path}`"
        )

    def _watch(self) -> None:
        deaths = 0
        while (process := self._process) is not None and not self._stopping.is_set():
            started = time.monotonic()
            self._wait_for_death(process)
            if self._stopping.is_set():
                return
            deaths = 1 if time.monotonic() - started > self._restart.settled_s else deaths + 1
            self._say(
                f"{self._server.name} ended by itself ({_said(process.wait())}) and is started again; "
                f"{self._server.last_words()}"
            )
            while not self._revive(deaths):
                deaths += 1
                if self._stopping.is_set():
                    return
                if deaths > self._restart.attempts_max:
                    self._say(f"{self._server.name} is given up after {deaths - 1} attempts: {self._trouble}")
                    return

    def _wait_for_death(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:  # already reaped
                return
            stack.callback(os.close, pidfd)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            while not poll.poll(_WATCH_S * 1000):
                try:
                    self._server.trim_logs()
                except OSError as error:
                    self._trouble = f"logs of {self._server.name} cannot be trimmed: {error}"

    def _revive(self, deaths: int) -> bool:
        delay_s = min(self._restart.longest_delay_s, self._restart.first_delay_s * 2 ** min(deaths - 1, 16))
        if self._stopping.wait(delay_s):
            return False
        with self._mutex:
            if self._stopping.is_set():
                return False
            if self.pid is not None:  # somebody called `start` meanwhile
                return True
            try:
                self._start_once()
            except ServerFailed as error:
                self._process = None
                self._say(str(error))
                return False
            self._restarts += 1
            self._trouble = None
            _LOG.warning("%s runs again", self._server.name)
            return True

    def _say(self, trouble: str) -> None:
        self._trouble = trouble
        _LOG.error("%s", trouble)


def _end(process: subprocess.Popen[bytes], stop_signal: signal.Signals, timeout_s: float) -> None:
    if process.poll() is None:
        process.send_signal(stop_signal)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_TIMEOUT_S)


def _said(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

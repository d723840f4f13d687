"""The coordinator's side of `birth.py`: ask for an agent, and learn at once whether it runs."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.driver import Abort
from actors.errors import DriverError, FailureKind
from infra.drivers.bare_metal import birth, launch
from infra.drivers.bare_metal.rundir import RunDirectory
from infra.host_process.cgroup import Cgroup

log = logging.getLogger(__name__)
_SLICE_MS = 10
_LATE_ANSWER_S = 0.5


class CannotBear(Exception):  # noqa: N818 - an answer, not an accident
    """This kernel does not let a process be born in a cgroup (before 5.7, or forbidden); nothing was started."""


class Nursery:
    """One helper process, started anew when it is gone. One birth at a time; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process number, None when there is none now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the helper, if it is not there; it gets ready while we go on."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, "-I", "-S", str(birth.__file__), launch.TITLE, str(theirs.fileno())]
            theirs.set_inheritable(True)
            self._process = subprocess.Popen(
                arguments,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,
            )
        self._channel = ours

    def bear(
        self,
        cgroup: Cgroup,
        run: RunDirectory,
        *,
        joins: Sequence[Path],
        command: Sequence[str],
        environment: Mapping[str, str],
        working_dir: str,
        timeout_s: float,
        abort: Abort,
    ) -> tuple[int, str, int]:
        """Return the number of a process that is our child, and which step failed with which errno: "", 0 if it runs.

        Raises:
            CannotBear: use another way.
            DriverError: no answer; whether a process was born is found by its cgroup.
        """
        order = {
            "cgroup": str(cgroup.path),
            "run": str(run.path),
            "joins": [str(path) for path in joins],
            "command": list(command),
            "environment": dict(environment),
            "working_dir": working_dir,
            "output": str(run.output),
        }
        with self._lock:
            try:
                self.start()
                assert self._channel is not None
                birth.send(self._channel, order)
                self._await(self._channel, timeout_s, abort)
                answer = birth.receive(self._channel)
            except OSError as error:
                self._end()
                raise DriverError("unknown", f"the nursery failed: {error}", transient=True) from error
            except DriverError:
                self._end()  # its late answer must not be taken for the next one's
                raise
        if answer is None:
            raise DriverError("unknown", "the nursery ended before it answered", transient=True)
        if "pid" not in answer:
            raise CannotBear(os.strerror(answer["errno"]))
        return int(answer["pid"]), str(answer.get("step", "")), int(answer.get("errno", 0))

    def close(self) -> None:
        """End the helper; agents are not its children and run on. Repeatable."""
        with self._lock:
            self._end()

    def _await(self, channel: socket.socket, timeout_s: float, abort: Abort) -> None:
        deadline = time.monotonic() + timeout_s
        waiter = select.poll()
        waiter.register(channel, select.POLLIN)
        called_off = False
        while not waiter.poll(_SLICE_MS):
            if abort.is_set() and not called_off:
                # An answer that is on its way names a process that is ours to collect.
                called_off, deadline = True, min(deadline, time.monotonic() + _LATE_ANSWER_S)
            if time.monotonic() >= deadline:
                if called_off:
                    raise DriverError("aborted", "called off while the process was starting", transient=True)
                raise DriverError("timeout", f"not running {timeout_s} s after its start", transient=True)

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def refusal(step: str, number: int, command: str, working_dir: str) -> DriverError:
    """Return why an agent did not come to run, in the words of what to correct."""
    why = os.strerror(number)
    match step:
        case "exec":
            return DriverError("refused", f"{command} could not be executed: {why}", transient=False)
        case "working directory":
            kind: FailureKind = "missing" if number == errno.ENOENT else "refused"
            return DriverError(kind, f"cannot start in {working_dir}: {why}", transient=False)
        case _:
            return DriverError("refused", f"the process could not set up its {step}: {why}", transient=True)

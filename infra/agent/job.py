"""The agent's one command: a process group of its own, watched, its output copied, ended politely or by force."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from infra.agent.output import LineBuffer, LineSplitter

_CHUNK_BYTES = 64 * 1024
_OUTPUT_WAIT_S = 5.0

CANNOT_RUN = 126
NOT_FOUND = 127


class JobFailed(Exception):  # noqa: N818 - the house names errors by what happened
    """The command could not be started; `exit_code` is what a shell would say: 126, or 127 when it is not there."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Job:
    """Runs from construction; `ended` is called once, from a thread, with the exit code (below zero: by that signal).

    By then nothing of its process group is left, and its output has been copied, as far as that took no longer than
    a few seconds.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        lines: LineBuffer,
        ended: Callable[[int], None],
    ) -> None:
        self._mutex = threading.Lock()
        self._over = False
        self._ended = ended
        self._process = _start(command, environment)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pumps = [
            threading.Thread(
                target=_pump, args=(source, sink, LineSplitter(lines)), name="agent-output", daemon=True
            )
            for source, sink in (
                (self._process.stdout, sys.stdout.fileno()),
                (self._process.stderr, sys.stderr.fileno()),
            )
        ]
        for pump in self._pumps:
            pump.start()
        threading.Thread(target=self._wait, name="agent-job", daemon=True).start()

    @property
    def pid(self) -> int:
        """The command's process, which is its group's number too."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group; nothing happens when the command is over."""
        with self._mutex:
            if not self._over:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        # Not collected yet, the dead command keeps its number from being given to somebody else: only so is the
        # last signal to the group sure to hit the command's own children.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._mutex:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._over = True
        # A process that left the group may hold the pipe open for ever, and a full terminal may not take more.
        deadline_s = time.monotonic() + _OUTPUT_WAIT_S
        for pump in self._pumps:
            pump.join(max(0.0, deadline_s - time.monotonic()))
        self._ended(code)


def _start(command: tuple[str, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
    except FileNotFoundError as error:
        raise JobFailed(NOT_FOUND, f"command {command[0]!r} was not found: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise JobFailed(CANNOT_RUN, f"command {command[0]!r} cannot be run: {error}") from error


def _pump(source: IO[bytes], sink: int, lines: LineSplitter) -> None:
    sink_open = True
    with source:
        while True:
            try:
                chunk = os.read(source.fileno(), _CHUNK_BYTES)
            except OSError:
                break
            if not chunk:
                break
            lines.feed(chunk)
            # A terminal that takes no more slows the job down; one that is gone must not end it.
            sink_open = sink_open and _write(sink, chunk)
    lines.end()


def _write(sink: int, data: bytes) -> bool:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(sink, view) :]
        except OSError:
            return False
    return True

"""Runs the host's own programs: a list of arguments, a deadline, and an error that tells all."""

import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from actors.errors import DriverError, FailureKind
from infra.network.namespace import entered

COMMAND_TIMEOUT_S = 30.0
NFT_TIMEOUT_S = 10.0
STDERR_SHOWN_MOST = 2000
"""Characters of stderr that an error carries, from its end."""

_NO_SUDO_RIGHT = "a password is required"


class CommandFailed(DriverError):  # noqa: N818 - what happened to a command
    """A program did not do its work: the message has the command, how it ended, how long it took, and its stderr."""

    def __init__(
        self, kind: FailureKind, message: str, *, transient: bool, stderr: str, code: int | None
    ) -> None:
        super().__init__(kind, message, transient=transient)
        self.stderr = stderr
        self.code = code


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """Where and as whom programs run. `sudo`: through `sudo -n`, which fails instead of asking for a password."""

    sudo: bool = False
    namespace: Path | None = None

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Return what the program wrote to stdout.

        Raises:
            CommandFailed: it is not installed, failed, or was killed at the deadline.
        """
        command = ["sudo", "-n", *arguments] if self.sudo else list(arguments)
        began = time.monotonic()
        with entered(self.namespace):
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            except FileNotFoundError as error:
                message = (
                    f"{command[0]} is not installed (for {shlex.join(command)}); on Debian: apt-get install "
                )
                message += {"sudo": "sudo", "nft": "nftables"}.get(command[0], "iproute2")
                raise CommandFailed("missing", message, transient=False, stderr="", code=None) from error
            except PermissionError as error:
                message = f"{shlex.join(command)} cannot be started: {error.strerror}"
                raise CommandFailed("refused", message, transient=False, stderr="", code=None) from error
        with _closing_pipes(process):
            try:
                output, errors = process.communicate(stdin, timeout_s)
            except subprocess.TimeoutExpired as error:
                raise _overdue(process, command, timeout_s, _tail(error.stderr or b"")) from error
            except BaseException:
                with suppress(PermissionError):
                    process.kill()
                raise
        if process.returncode != 0:
            raise _failed(command, process.returncode, _tail(errors), time.monotonic() - began)
        return output


@contextmanager
def _closing_pipes(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _overdue(
    process: subprocess.Popen[str], command: Sequence[str], timeout_s: float, tail: str
) -> CommandFailed:
    try:
        process.kill()
    except PermissionError:
        # sudo runs as root, and only root may end it: it is left behind without anybody to listen to it.
        ended = f"did not end within {timeout_s:g} s, and may not be killed by us"
    else:
        process.wait()
        ended = f"was killed at its limit of {timeout_s:g} s"
    message = f"{shlex.join(command)} {ended}; stderr: {tail or '(empty)'}"
    return CommandFailed("timeout", message, transient=True, stderr=tail, code=None)


def _failed(command: Sequence[str], code: int, stderr: str, took_s: float) -> CommandFailed:
    ended = f"exited with {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
    message = (
        f"{shlex.join(command)} {ended} after {took_s:.2f} s, not timed out; stderr: {stderr or '(empty)'}"
    )
    refused = "not permitted" in stderr or "ermission denied" in stderr or _NO_SUDO_RIGHT in stderr
    if refused:
        message += "; run as root, or allow it without a password in sudoers and set use_sudo"
    kind: FailureKind = "refused" if refused else "unknown"
    return CommandFailed(kind, message, transient=not refused, stderr=stderr, code=code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return text.strip()[-STDERR_SHOWN_MOST:]

"""Host commands: what an error tells, and that no command outlives its limit."""

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from actors.errors import DriverError
from infra.network.commands import STDERR_SHOWN_MOST, CommandFailed, Commands
from infra.network.namespace import entered
from infra.network.tun import no_tun

PLAIN = Commands()


def test_what_a_command_says_is_returned_and_it_reads_what_it_is_given() -> None:
    assert PLAIN.run("cat", stdin="a\nb") == "a\nb"


def test_a_failure_tells_command_code_duration_and_stderr() -> None:
    with pytest.raises(CommandFailed) as caught:
        PLAIN.run("sh", "-c", "echo 'no such thing' >&2; exit 3")
    message = str(caught.value)
    assert "sh -c 'echo '" in message
    assert "exited with 3 after 0.0" in message
    assert "not timed out" in message
    assert message.endswith("stderr: no such thing")
    assert (caught.value.code, caught.value.stderr, caught.value.transient) == (3, "no such thing", True)


def test_silence_is_told_as_such_and_a_flood_only_by_its_end() -> None:
    with pytest.raises(CommandFailed, match=r"stderr: \(empty\)$"):
        PLAIN.run("false")
    with pytest.raises(CommandFailed) as caught:
        PLAIN.run("sh", "-c", "yes x | head -c 100000 >&2; echo last >&2; exit 1")
    assert caught.value.stderr.endswith("last")
    assert len(caught.value.stderr) <= STDERR_SHOWN_MOST


def test_a_signal_is_told_by_name() -> None:
    with pytest.raises(CommandFailed, match="was ended by SIGKILL after"):
        PLAIN.run("sh", "-c", "kill -9 $$")


def test_a_command_is_killed_at_its_limit() -> None:
    began = time.monotonic()
    with pytest.raises(CommandFailed, match=r"sleep 30 was killed at its limit of 0\.2 s") as caught:
        PLAIN.run("sleep", "30", timeout_s=0.2)
    assert time.monotonic() - began < 10
    assert (caught.value.kind, caught.value.transient) == ("timeout", True)


def test_one_that_we_may_not_kill_is_left_behind_in_time_and_told_as_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed: list[subprocess.Popen[str]] = []

    def refuse(process: subprocess.Popen[str]) -> None:
        killed.append(process)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", refuse)
        began = time.monotonic()
        with pytest.raises(
            CommandFailed, match=r"did not end within 0\.2 s, and may not be killed"
        ) as caught:
            Commands(sudo=True).run("sleep", "30", timeout_s=0.2)
        assert time.monotonic() - began < 10
    assert (caught.value.kind, caught.value.transient) == ("timeout", True)
    killed[0].kill()
    killed[0].wait(10)


def test_a_program_that_is_not_there_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandFailed, match="apt-get install nftables") as caught:
        PLAIN.run("nft", "list", "tables")
    assert (caught.value.kind, caught.value.transient) == ("missing", False)


def test_sudo_is_asked_never_to_ask_and_its_refusal_is_final(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(
        '#!/bin/sh\n[ "$1" = -n ] && [ "$2" = true ] && exit 0\necho "sudo: a password is required" >&2; exit 1\n'
    )
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Commands(sudo=True).run("true")
    with pytest.raises(CommandFailed, match=r"sudo -n ip link.*sudoers") as caught:
        Commands(sudo=True).run("ip", "link")
    assert (caught.value.kind, caught.value.transient) == ("refused", False)


def test_a_namespace_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(DriverError, match="/run/netns/fleetlog-no-such"),
        entered(Path("/run/netns/fleetlog-no-such")),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.ENOENT, "missing", "modprobe tun"),
        (errno.ENODEV, "missing", "modprobe tun"),
        (errno.EACCES, "refused", "use_sudo"),
    ],
)
def test_without_tun_the_way_out_is_told(number: int, kind: str, told: str) -> None:
    error = no_tun(OSError(number, os.strerror(number)))
    assert (error.kind, error.transient) == (kind, False)
    assert told in str(error)

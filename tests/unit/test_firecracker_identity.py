"""The process a microVM is, and the three fail-safe directions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.drivers.firecracker import jailer
from infra.drivers.firecracker.identity import (
    Probe,
    View,
    has_exited,
    held,
    judge,
    look,
    may_delete,
    may_signal,
    read_pid,
    root_of,
)
from infra.host_process.process import Stat

ALIVE = Stat(state="S", group=1, session=1, start_ticks=1000)
VM = View(pid=4711, stat=ALIVE, name="firecracker", root="same")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "600"])
    yield made
    made.kill()
    made.wait()


@pytest.mark.parametrize("text", ["0", "", "abc", "-1", "1", "99999999999", "12 13", "\u0663"])
def test_what_is_no_process_number_in_a_pid_file_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "firecracker.pid"
    file.write_text(text)
    assert read_pid(file) is None
    assert judge(View(read_pid(file))).state == "gone"


def test_a_missing_or_unreadable_pid_file_names_no_process(tmp_path: Path) -> None:
    assert read_pid(tmp_path / "missing") is None
    assert read_pid(tmp_path) is None


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (VM, "confirmed"),
        (VM._replace(root="unreadable"), "confirmed"),
        (VM._replace(root="other"), "unconfirmed"),
        (VM._replace(name="bash"), "unconfirmed"),
        (VM._replace(stat=None), "gone"),
        (VM._replace(stat=Stat(state="Z", group=1, session=1, start_ticks=1000)), "gone"),
        (VM._replace(stat="unreadable"), "unconfirmed"),
        (VM._replace(started_after_file_s=59.0), "confirmed"),
        (VM._replace(started_after_file_s=61.0), "gone"),
        (VM._replace(started_after_file_s=-1e6), "confirmed"),
        (VM._replace(recorded_ticks=1000), "confirmed"),
        (VM._replace(recorded_ticks=1001), "gone"),
        (VM._replace(name="jailer", launching=True), "launching"),
        (VM._replace(name="jailer", launching=True, recorded_ticks=7), "gone"),
        (View(None), "gone"),
    ],
)
def test_what_was_read_of_a_process_is_judged(view: View, state: str) -> None:
    assert judge(view).state == state


def probe(state: str) -> Probe:
    return Probe(state, 4711, 1000, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "signalled", "deleted"),
    [
        ("gone", False, True),
        ("unconfirmed", False, False),
        ("launching", True, False),
        ("confirmed", True, False),
    ],
)
def test_doubt_signals_nothing_and_deletes_nothing(state: str, signalled: bool, deleted: bool) -> None:  # noqa: FBT001
    assert may_signal(probe(state)) is signalled
    assert may_delete(probe(state)) is deleted


def test_only_the_end_of_a_proven_process_is_an_exit(sleeper: subprocess.Popen[bytes]) -> None:
    with held(sleeper.pid) as pidfd:
        assert has_exited(probe("gone"), None)
        assert not has_exited(probe("confirmed"), pidfd)
        assert not has_exited(probe("confirmed"), None), "no pidfd is no evidence"
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert has_exited(probe("confirmed"), pidfd)
        assert not has_exited(probe("unconfirmed"), pidfd), "a stranger's end is not the machine's"


def test_a_real_process_is_known_by_its_root_and_not_by_its_link(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    assert root_of(sleeper.pid, Path("/")) == "same"
    assert root_of(sleeper.pid, tmp_path) == "other"
    assert look(sleeper.pid, tmp_path).state == "unconfirmed"


def test_a_number_that_was_recycled_reads_as_gone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    file = tmp_path / "firecracker.pid"
    file.write_text(str(sleeper.pid))
    os.utime(file, (0, file.stat().st_mtime - 61))
    assert look(sleeper.pid, tmp_path, pid_file=file).state == "gone"
    os.utime(file, (0, file.stat().st_mtime + 61 + 1))
    assert look(sleeper.pid, tmp_path, pid_file=file).state == "unconfirmed"


def test_a_jailer_is_known_by_id_and_base() -> None:
    line = b"/x/jailer\0--id\0vm-1\0--exec-file\0/x/f\0--chroot-base-dir\0/srv/jailer\0--\0--api-sock\0/a"
    assert jailer.is_launching(line, "vm-1", "/srv/jailer")
    assert not jailer.is_launching(line, "vm-2", "/srv/jailer")
    assert not jailer.is_launching(line, "vm-1", "/srv")
    assert not jailer.is_launching(b"", "vm-1", "/srv/jailer")

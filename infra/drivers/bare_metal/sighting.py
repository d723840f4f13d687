"""What can be proven about one machine's processes on this host, as the ground for saying so and for signalling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from events.vm import Handle
from infra.drivers.bare_metal import launch
from infra.drivers.bare_metal.rundir import RunDirectory
from infra.host_process import process
from infra.host_process.cgroup import Cgroup

Main = Literal[
    "none",  # no process of ours: none was started, it ended, or its number is another's now
    "launching",  # ours, but not yet the agent
    "alive",
    "doubt",  # could not be read, or the number and start fit and nothing else does
]


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. `members` live in the machine's cgroup, the main process included."""

    main: Main
    pid: int | None = None
    start_ticks: int | None = None
    members: frozenset[int] = frozenset()
    traces: tuple[str, ...] = ()
    evidence: str = ""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A record that says which process it is; `start_ticks` None: a number alone, which proves nothing."""

    pid: int
    start_ticks: int | None
    boot_id: str
    executable: str | None = None


def claim(run: RunDirectory, handle: Handle | None, boot_id: str) -> Claim | None:
    """Return the best record there is: the log's handle, the directory's, or the number the process wrote itself."""
    if handle is not None and process.legal(handle.data.get("pid")):
        data = handle.data
        return Claim(
            pid=data["pid"],
            start_ticks=data.get("start_ticks"),
            boot_id=str(data.get("boot_id", boot_id)),
            executable=data.get("executable"),
        )
    recorded = run.recorded()
    if recorded is not None and process.legal(recorded.pid):
        return Claim(
            pid=recorded.pid,
            start_ticks=recorded.start_ticks,
            boot_id=recorded.boot_id,
            executable=recorded.executable,
        )
    pid = run.claimed_pid()
    mark = run.mark()
    if pid is not None and process.legal(pid):
        return Claim(pid=pid, start_ticks=None, boot_id=mark.boot_id if mark is not None else boot_id)
    return None


def look(run: RunDirectory, handle: Handle | None, cgroup: Cgroup | None, boot_id: str) -> Sighting:
    """Look at the host.

    Raises:
        OSError: it could not be looked at.
    """
    members = cgroup.members() if cgroup is not None and cgroup.populated() else frozenset()
    traces = [f"directory {run.path}"] if run.exists() else []
    if cgroup is not None and cgroup.exists():
        traces.append(f"cgroup {cgroup.path} with {len(members)} processes")
    named = claim(run, handle, boot_id)
    now = process.boot_id()
    main: Main = "none"
    how, ticks = "no process is on record", None
    if named is not None and named.boot_id != now:
        how = f"process {named.pid} was of another boot ({named.boot_id}, now {now})"
    elif named is not None:
        main, ticks, how = _main(named, run, members)
    elif members:
        main, how = "doubt", "its cgroup has processes, and none is on record as the first"
    return Sighting(
        main=main,
        pid=named.pid if named is not None else None,
        start_ticks=ticks,
        members=members,
        traces=tuple(traces),
        evidence="; ".join([how, *traces]),
    )


def _main(named: Claim, run: RunDirectory, members: frozenset[int]) -> tuple[Main, int | None, str]:
    """Prove that the number is still that process, with a pidfd open so that it cannot become another's meanwhile."""
    pid = named.pid
    with held(pid) as pidfd:
        if pidfd is None:
            return "none", None, f"process {pid} is gone"
        try:
            stat = process.stat(pid)
        except OSError as error:
            return "doubt", None, f"process {pid} cannot be read: {error.strerror}"
        if stat is None or stat.ended or process.pidfd_ended(pidfd):
            return "none", None, f"process {pid} has ended"
        if named.start_ticks not in (None, stat.start_ticks):
            return "none", None, f"number {pid} is another process now, started at tick {stat.start_ticks}"
        mark = run.mark()
        proofs = [
            *(["is in its cgroup"] if pid in members else []),
            *(["bears its cookie"] if mark is not None and process.bears(pid, mark.cookie) else []),
        ]
        if named.start_ticks is not None:
            started = f"started at tick {stat.start_ticks}"
            if named.executable is not None and process.executable(pid) == named.executable:
                proofs.append(f"runs {named.executable}")
            if not proofs:
                return "doubt", stat.start_ticks, f"process {pid} {started}, but nothing else proves it"
            proofs.append(started)
        elif not proofs:
            return "none", None, f"number {pid} on record is a stranger's"
        main: Main = "launching" if launch.launching(pid) else "alive"
        return main, stat.start_ticks, f"process {pid} {', '.join(proofs)}"


@contextmanager
def held(pid: int) -> Iterator[int | None]:
    """Hold a pidfd of the process while its identity is looked at; None when there is no such process."""
    pidfd = process.open_pidfd(pid)
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)

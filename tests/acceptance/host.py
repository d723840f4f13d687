"""What the host itself shows of one test's agents and servers: processes, cgroups, directories; no driver is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from infra.host_process.cgroup import mounts


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `done`, or fail with `what` did not come about."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.03)


def processes_of(place: Path) -> dict[int, str]:
    """Return the processes whose command line, environment or folder names `place`, with what they are."""
    found = {}
    mark = str(place)
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            words = process.cmdline()
            if any(mark in text for text in (*words, *process.environ().values(), process.cwd())):
                found[process.pid] = " ".join(words)
    return found


def cgroups_of(owner: str) -> list[str]:
    """Return the agents' cgroups of one coordinator, in every hierarchy."""
    return [str(path) for folder in _levels(owner) for path in folder.iterdir() if path.is_dir()]


def _levels(owner: str) -> Iterator[Path]:
    """Yield the owner's levels; cgroups of others come and go meanwhile, which `glob` does not forgive."""
    for mount in (*mounts("cgroup2"), *mounts("cgroup")):
        for folder, names, _ in os.walk(mount.point):
            if Path(folder).name == "fleetlog" and owner in names:
                yield Path(folder) / owner


def remove_cgroup_level(owner: str) -> None:
    """Remove the emptied level that coordinators keep for their agents."""
    for folder in _levels(owner):
        folder.rmdir()

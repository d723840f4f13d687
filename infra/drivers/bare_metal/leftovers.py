"""What agents left on this host as processes, dead or alive: found from the host alone, taken away without any log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from actors.errors import DriverError, Refused
from actors.reclaiming import Leftover, Life
from infra.drivers.bare_metal import limits, sighting, teardown
from infra.drivers.bare_metal.config import BareMetalConfig
from infra.drivers.bare_metal.hierarchy import Hierarchy
from infra.drivers.bare_metal.rundir import Mark, RunDirectory
from infra.drivers.bare_metal.sighting import Sighting
from infra.host_process import process
from infra.host_process.cgroup import Cgroup
from infra.host_process.files import keep_log, trim_logs

_NEVER = threading.Event()


Find = Callable[[str, Path, str], tuple[Hierarchy | None, str]]
"""Finds the cgroup hierarchy agents are in; `hierarchy.find` does."""


class ProcessLeftovers:
    """The `Reclaiming` of one folder of agents as processes, and of their cgroups."""

    def __init__(
        self,
        config: BareMetalConfig,
        find: Find,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._hierarchy: Hierarchy | None = None
        if config.cgroup == "auto":
            self._hierarchy, _ = find(config.owner, Path(config.state_dir), config.shell)
        self._reach = reach
        self._runs = Path(config.state_dir) / "runs"
        self._logs = Path(config.state_dir) / "logs"

    def leftovers(self) -> tuple[Leftover, ...]:
        """List the directories of this folder, and the cgroups of all owners."""
        try:
            names = (
                {path.name.removeprefix(".new-") for path in self._runs.iterdir()}
                if self._runs.exists()
                else set()
            )
            found = [self._directory(vm) for vm in sorted(names)]
            groups = self._hierarchy.listing() if self._hierarchy is not None else []
        except OSError as error:
            raise DriverError("unknown", f"the listing is partial: {error}", transient=True) from error
        return (*found, *(_cgroup(*each) for each in groups))

    def reclaim(self, leftover: Leftover) -> str:
        """Remove the directory with its cgroup, its output kept; or a cgroup that is left alone."""
        run, cgroup, mark = self._places(leftover)
        if leftover.kind == "cgroup":
            if cgroup is None or not cgroup.remove(self.config.kill_wait_s):
                raise DriverError("still-there", f"cgroup {leftover.name} is not empty", transient=True)
            return "removed"
        life, seen = self._look(run, cgroup, mark)
        if life != "dead":
            raise DriverError("still-there", f"it is kept: {seen.evidence}", transient=True)
        self._remove(run, cgroup)
        return f"{seen.evidence}; removed"

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """End all its processes, each proven anew, and remove what is left."""
        run, cgroup, mark = self._places(leftover)
        life, seen = self._look(run, cgroup, mark)
        if life == "dead":
            raise Refused("not-live", f"{leftover.vm} does not run: {seen.evidence}")
        if life == "doubt" or mark is None:
            raise Refused("unverified", f"{leftover.vm} is not provably the machine: {seen.evidence}")
        cookie = mark.cookie if mark.boot_id == process.boot_id() else None
        bounds = teardown.Bounds(self.config.stop_grace_s, self.config.kill_wait_s)
        # Nothing may come between this answer and the signal: its agent may have been let in meanwhile.
        why = accounted()
        if why:
            raise Refused("tracked", why)
        ended = teardown.end_all(seen, cgroup, cookie, bounds, _NEVER)
        self._reach("bare-metal.reclaim.killed")
        self._remove(run, cgroup)
        return f"{ended}; directory removed"

    def _directory(self, vm: str) -> Leftover:
        run = RunDirectory(self._runs / vm)
        mark = run.mark()
        cgroup = self._cgroup_of(vm) if mark is not None and mark.owner == self.config.owner else None
        life, seen = self._look(run, cgroup, mark)
        return Leftover(
            kind="directory",
            name=str(run.path),
            vm=vm,
            owner=None if mark is None else mark.owner,
            life=life,
            evidence=seen.evidence,
            pid=None if life == "dead" else seen.pid,
            age_s=None if life == "dead" else _age_s(seen.start_ticks),
        )

    def _places(self, leftover: Leftover) -> tuple[RunDirectory, Cgroup | None, Mark | None]:
        assert leftover.vm is not None, "listed by its machine's name"
        run = RunDirectory(self._runs / leftover.vm)
        return run, self._cgroup_of(leftover.vm), run.mark()

    def _cgroup_of(self, vm: str) -> Cgroup | None:
        return None if self._hierarchy is None else self._hierarchy.cgroup(self._hierarchy.path_of(vm))

    def _look(self, run: RunDirectory, cgroup: Cgroup | None, mark: Mark | None) -> tuple[Life, Sighting]:
        """Tell whether anything of it lives: its first process, its cgroup's, or any that bears its cookie."""
        try:
            seen = sighting.look(run, None, cgroup, process.boot_id() if mark is None else mark.boot_id)
        except OSError as error:
            return "doubt", Sighting(main="doubt", evidence=f"it could not be looked at: {error}")
        if seen.main == "doubt":
            return ("alive" if seen.members else "doubt"), seen
        if seen.main != "none" or seen.members:
            return "alive", seen
        if mark is not None and any(process.bears(pid, mark.cookie) for pid in process.all_pids()):
            return "alive", seen
        return "dead", seen

    def _remove(self, run: RunDirectory, cgroup: Cgroup | None) -> None:
        run.close_to_newcomers()
        self._reach("bare-metal.reclaim.directory")
        kept = self._logs / f"{run.path.name}.log"
        v1 = limits.v1_directories(self.config.owner, run.path.name) if self.config.enforce_limits else {}
        teardown.remove_traces(
            run, cgroup, v1.values(), lambda: keep_log(run.output, kept, self.config.kept_log_bytes)
        )
        trim_logs(self._logs, self.config.kept_logs)


def _cgroup(owner: str, vm: str, processes: int) -> Leftover:
    return Leftover(
        kind="cgroup",
        name=f"{owner}/{vm}",
        vm=vm,
        owner=owner,
        life="alive" if processes else "dead",
        evidence=f"{processes} processes are in it",
    )


def _age_s(start_ticks: int | None) -> float | None:
    if start_ticks is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")

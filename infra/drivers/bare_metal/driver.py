"""The bare-metal `Driver`: host processes as agents, found again after our restart by cgroup, number and start time."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.decisions.addresses import Lease
from actors.driver import Abort, Exit, Found, Presence, Resource, SpawnOrder
from actors.errors import DriverError
from events.vm import Handle
from infra.drivers.bare_metal import environment, hierarchy, launch, limits, sighting, teardown
from infra.drivers.bare_metal.config import BareMetalConfig, LabelSet
from infra.drivers.bare_metal.rundir import Mark, ProcessRecord, RunDirectory
from infra.drivers.bare_metal.sighting import Sighting
from infra.drivers.bare_metal.starter import Birth, Starter
from infra.file_tail import last_lines
from infra.host_process import process
from infra.host_process.cgroup import Cgroup
from infra.host_process.files import keep_log, trim_logs
from infra.host_process.output import Output, Sink
from infra.host_process.watcher import Watched, Watcher

log = logging.getLogger(__name__)
HANDLE_VERSION = 1
_COLLECT_WAIT_S = 2.0


class BareMetalDriver:
    """Host processes as agents.

    Each runs in a session and process group of its own, without input, with its output in a file, and in a cgroup v2
    named by its id where one can be made (`hierarchy.find`); where none can, a warning says so, and only the process
    group, and whatever bears its cookie in its environment, is promised to end. `sink` gets what agents write, line
    by line. `reach` is called between steps, so that tests can crash there.
    """

    def __init__(
        self,
        config: BareMetalConfig,
        *,
        sink: Sink | None = None,
        ambient: Mapping[str, str] | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._state = Path(config.state_dir)
        self._runs = self._state / "runs"
        self._logs = self._state / "logs"
        self._ambient = dict(os.environ if ambient is None else ambient)
        self._reach = reach
        self._hierarchy, self.cgroup_reason = (
            hierarchy.find(config.owner, self._state, config.shell)
            if config.cgroup == "auto"
            else (None, "switched off by `cgroup: none`")
        )
        if self._hierarchy is None:
            log.warning(
                "no cgroup for agents (%s): only their process groups are promised to end", self.cgroup_reason
            )
        if any(label_set.network_policy for label_set in config.label_sets):
            log.warning("network_policy of a host process cannot be enforced; use containers or microVMs")
        self._watcher = Watcher("bare-metal")
        self._starter = Starter(self._watcher, reach, cgroups=self._hierarchy is not None)
        self._output = Output(sink, config.live_log_bytes, "bare-metal")

    @property
    def backend(self) -> str:
        """Return `bare-metal`."""
        return "bare-metal"

    @property
    def nursery_pid(self) -> int | None:
        """The helper in which agents are born, None where there is none; see `nursery`."""
        return self._starter.nursery.pid if self._starter.nursery is not None else None

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        """Return where the machine's directory and cgroups will be, and under which boot."""
        del scaler, lease
        self._label_set(labels)
        return {
            "version": 1,
            "boot_id": process.boot_id(),
            "run": str(self._runs / vm),
            "log": str(self._logs / f"{vm}.log"),
            "cgroup": self._hierarchy.path_of(vm) if self._hierarchy is not None else None,
            "limits": limits.v1_directories(self.config.owner, vm) if self.config.enforce_limits else {},
        }

    def spawn(self, order: SpawnOrder, abort: Abort) -> Handle:
        """Start the label set's program; the handle comes when it has become that program."""
        label_set = self._label_set(order.labels)
        self._go_on(abort)
        binary = launch.executable(label_set.binary_path)
        run, cgroup = self._run(order.placement), self._cgroup(order.placement)
        mark = Mark(
            vm=order.vm,
            owner=self.config.owner,
            boot_id=order.placement["boot_id"],
            cookie=secrets.token_hex(16),
        )
        try:
            run.create(mark)
            self._reach("bare-metal.spawn.directory")
            joins = self._make_cgroups(order, cgroup)
        except FileExistsError as error:
            raise DriverError("refused", f"{error}: ids are never reused", transient=False) from error
        except OSError as error:
            raise DriverError(
                "exhausted", f"cannot make its directory or cgroup: {error}", transient=True
            ) from error
        self._reach("bare-metal.spawn.cgroup")
        self._go_on(abort)
        birth = Birth(
            vm=order.vm,
            run=run,
            cgroup=cgroup,
            joins=joins,
            command=[binary, *label_set.args],
            environment=environment.build(
                self.config, label_set, self._ambient, order.environment, mark.cookie
            ),
            working_dir=label_set.working_dir or str(run.work),
        )
        watched = self._starter.start(birth, self.config.shell, self.config.start_timeout_s, abort)
        return self._record(order, run, watched)

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Say what is provable; a machine of an earlier boot is at most a directory."""
        try:
            run, cgroup = self._run(placement), self._cgroup(placement)
            handle = handle or self._held(vm, placement, run)
            seen = sighting.look(run, handle, cgroup, placement["boot_id"])
            presence: Presence = "absent"
            if seen.main == "alive":
                presence = "running"
            elif seen.main == "doubt":
                presence = "unknown"
            elif seen.main == "launching" or seen.traces:
                presence = "half-made"
            found = None
            if presence == "running" and seen.pid is not None and seen.start_ticks is not None:
                found = handle or self._handle(placement, run, seen.pid, seen.start_ticks)
        except OSError as error:
            return Found(presence="unknown", evidence=f"the host could not be asked: {error}")
        return Found(presence=presence, evidence=seen.evidence, handle=found)

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Tell the end of the main process; also takes up the output of a machine of an earlier coordinator."""
        run = self._run(placement)
        if self._watcher.get(vm) is None:
            pid, start_ticks = handle.data.get("pid"), handle.data.get("start_ticks")
            same_boot = handle.data.get("boot_id") == process.boot_id()
            pidfd = _open_if_same(pid, start_ticks) if same_boot else None
            if pidfd is None or not isinstance(pid, int) or not isinstance(start_ticks, int):
                ended(
                    Exit(
                        exit_code=None, detail="it had ended before we looked; nobody collected its exit code"
                    )
                )
                return
            self._watcher.add(vm, pid, start_ticks, pidfd)
        if run.exists():
            self._output.follow(vm, run.output, run.offset)
        if not self._watcher.on_end(vm, ended):
            ended(Exit(exit_code=None, detail="it was taken down"))

    def destroy(self, vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
        """SIGTERM to all of it, the grace, SIGKILL to all of it, and then its cgroup and directory."""
        run = self._run(placement)
        try:
            cgroup = self._cgroup(placement)
            run.close_to_newcomers()
            handle = handle or self._held(vm, placement, run)
            seen = sighting.look(run, handle, cgroup, placement["boot_id"])
            if seen.main == "doubt" and seen.pid not in seen.members and not seen.members:
                raise DriverError(
                    "still-there", f"not signalled without proof: {seen.evidence}", transient=True
                )
            mark = run.mark()
            bounds = teardown.Bounds(self.config.stop_grace_s, self.config.kill_wait_s)
            same_boot = placement["boot_id"] == process.boot_id()
            cookie = mark.cookie if mark is not None and same_boot else None
            self._hold(vm, seen)
            ending = teardown.end_all(seen, cgroup, cookie, bounds, abort)
        except OSError as error:
            raise DriverError("unknown", f"the host could not be asked: {error}", transient=True) from error
        self._reach("bare-metal.destroy.ended")
        self._collect(vm)
        self._output.finish(vm)
        kept = Path(placement["log"])
        teardown.remove_traces(
            run,
            cgroup,
            placement.get("limits", {}).values(),
            lambda: keep_log(run.output, kept, self.config.kept_log_bytes),
        )
        trim_logs(self._logs, self.config.kept_logs)
        left = sighting.look(run, handle, cgroup, placement["boot_id"])
        if left.traces or left.main != "none":
            raise DriverError("still-there", f"after its teardown: {left.evidence}", transient=True)
        where = (
            f"cgroup {placement['cgroup']} empty and removed" if cgroup is not None else "no cgroup was had"
        )
        return f"{ending}; {where}; directory removed; {left.evidence}"

    def clear_bootstrap(self, vm: str, placement: dict[str, Any], handle: Handle) -> None:
        """Do nothing: nothing is left where the machine could read it."""

    def survey(self) -> tuple[Resource, ...]:
        """List the directories and the cgroups of all owners."""
        found: list[Resource] = []
        try:
            for path in sorted(self._runs.iterdir()) if self._runs.exists() else []:
                vm = path.name.removeprefix(".new-")
                mark = RunDirectory(self._runs / vm).mark()
                owner = mark.owner if mark is not None else None
                found.append(Resource(kind="directory", name=str(path), vm=vm, owner=owner))
            groups = self._hierarchy.listing() if self._hierarchy is not None else []
            for owner, vm, members in groups:
                detail = f"{members} processes"
                found.append(Resource(kind="cgroup", name=f"{owner}/{vm}", vm=vm, owner=owner, detail=detail))
        except OSError as error:
            raise DriverError("unknown", f"the listing is partial: {error}", transient=True) from error
        return tuple(found)

    def log_tail(self, vm: str, placement: dict[str, Any], lines: int) -> tuple[str, ...]:
        """Return the last lines, of a running machine or of one whose log was kept."""
        del vm
        output = self._run(placement).output
        return last_lines(output if output.exists() else Path(placement["log"]), lines)

    def close(self) -> None:
        """Let go; agents run on."""
        self._starter.close()
        self._watcher.close()
        self._output.close()

    def teardown_host(self) -> str:
        """Remove what is there for all machines: our cgroup level, our mount, empty directories. After all are gone."""
        limits.remove_parents(self.config.owner)
        if self._hierarchy is not None:
            self._hierarchy.remove_parents()
        unmounted = hierarchy.unmount(self._state)
        if self._runs.exists() and not any(self._runs.iterdir()):
            self._runs.rmdir()
        return f"cgroup level removed{', private cgroup2 unmounted' if unmounted else ''}"

    def _label_set(self, labels: tuple[str, ...]) -> LabelSet:
        wanted = {label.lower() for label in labels}
        for label_set in self.config.label_sets:
            if {label.lower() for label in label_set.labels} == wanted:
                return label_set
        raise DriverError("missing", f"no label set {sorted(wanted)} is configured here", transient=False)

    def _run(self, placement: dict[str, Any]) -> RunDirectory:
        return RunDirectory(Path(placement["run"]))

    def _cgroup(self, placement: dict[str, Any]) -> Cgroup | None:
        """Return its cgroup, None when it was planned without.

        Raises:
            OSError: it was planned with one, and there is no hierarchy now to look at.
        """
        path = placement.get("cgroup")
        if path is None:
            return None
        if self._hierarchy is None:
            if placement["boot_id"] != process.boot_id():
                return None
            raise OSError(f"its cgroup {path} cannot be seen: {self.cgroup_reason}")
        return self._hierarchy.cgroup(path)

    def _make_cgroups(self, order: SpawnOrder, cgroup: Cgroup | None) -> list[Path]:
        joins = []
        if cgroup is not None:
            cgroup.path.mkdir(parents=True)
        if self.config.enforce_limits:
            more, unmet = limits.apply(order.limits, cgroup, order.placement.get("limits", {}))
            joins.extend(more)
            if unmet:
                log.warning("%s runs without its limit of %s: no such controller here", order.vm, unmet)
        return joins

    def _record(self, order: SpawnOrder, run: RunDirectory, watched: Watched) -> Handle:
        handle = self._handle(order.placement, run, watched.pid, watched.start_ticks)
        try:
            run.record(
                ProcessRecord(
                    pid=watched.pid,
                    start_ticks=watched.start_ticks,
                    boot_id=order.placement["boot_id"],
                    executable=handle.data["executable"],
                )
            )
        except OSError as error:
            raise DriverError("exhausted", f"cannot record its process: {error}", transient=True) from error
        self._output.follow(order.vm, run.output, run.offset)
        self._reach("bare-metal.spawn.recorded")
        return handle

    def _handle(self, placement: dict[str, Any], run: RunDirectory, pid: int, start_ticks: int) -> Handle:
        recorded = run.recorded()
        known = recorded.executable if recorded is not None else None
        data = {
            "pid": pid,
            "start_ticks": start_ticks,
            "boot_id": placement["boot_id"],
            "executable": known or process.executable(pid) or "",
            "cgroup": placement.get("cgroup"),
            "log": str(run.output),
        }
        return Handle(driver=self.backend, version=HANDLE_VERSION, data=data)

    def _held(self, vm: str, placement: dict[str, Any], run: RunDirectory) -> Handle | None:
        """Return a handle of the process we started ourselves, which may not have come to any record yet."""
        watched = self._watcher.get(vm)
        return self._handle(placement, run, watched.pid, watched.start_ticks) if watched is not None else None

    def _hold(self, vm: str, seen: Sighting) -> None:
        """Hold the proven process if we do not yet: it may be a child of ours that nobody else would collect."""
        if seen.main in ("alive", "launching") and self._watcher.get(vm) is None:
            pidfd = _open_if_same(seen.pid, seen.start_ticks)
            if pidfd is not None and seen.pid is not None and seen.start_ticks is not None:
                self._watcher.add(vm, seen.pid, seen.start_ticks, pidfd)

    def _collect(self, vm: str) -> None:
        """Let the watcher collect the exit code, so that no zombie is left, and let go."""
        watched = self._watcher.get(vm)
        if watched is not None:
            watched.over.wait(_COLLECT_WAIT_S)
        self._watcher.forget(vm)

    def _go_on(self, abort: Abort) -> None:
        if abort.is_set():
            raise DriverError("aborted", "called off before the process was started", transient=True)


def _open_if_same(pid: object, start_ticks: object) -> int | None:
    """Return a pidfd if the number is still that process; doubt counts as yes, as only an end may be told."""
    if not isinstance(pid, int) or not process.legal(pid) or not isinstance(start_ticks, int):
        return None
    pidfd = process.open_pidfd(pid)
    if pidfd is None:
        return None
    try:
        stat = process.stat(pid)
    except OSError:
        return pidfd
    if stat is not None and stat.start_ticks == start_ticks:
        return pidfd
    os.close(pidfd)
    return None

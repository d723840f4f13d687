"""The Firecracker `Driver`: jailed microVMs as agents, found again after our restart by their chroot."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.decisions.addresses import Lease
from actors.driver import Abort, Exit, Found, Presence, Resource, SpawnOrder
from actors.errors import DriverError
from events.vm import Handle
from infra.drivers.firecracker import boot_failure, console, identity, limits, paths, sighting, teardown
from infra.drivers.firecracker.api import Api, ApiError
from infra.drivers.firecracker.bringup import Bringup, Wanted, wanted
from infra.drivers.firecracker.chroot import Chroot
from infra.drivers.firecracker.config import SPAWN_WIDTH, FirecrackerConfig, LabelSet
from infra.drivers.firecracker.gate import Gate
from infra.drivers.firecracker.host_net import HostNet
from infra.drivers.firecracker.identity import Probe
from infra.drivers.firecracker.overlay import Templates
from infra.drivers.firecracker.paths import Paths
from infra.drivers.firecracker.sighting import Sighting
from infra.drivers.firecracker.turns import Turns
from infra.file_tail import last_lines
from infra.host_process import process
from infra.host_process.files import keep_log, trim_logs
from infra.host_process.output import Output
from infra.host_process.watcher import Watched, Watcher

log = logging.getLogger(__name__)
HANDLE_VERSION = 1
_ASK_TIMEOUT_S = 2.0
_COLLECT_WAIT_S = 2.0
_LAST_WORDS = 50


class FirecrackerDriver:
    """Jailed microVMs as agents.

    `net` makes TAPs and rules. `gate` bounds how many come up at once over all scalers of the process; without one
    the driver has its own. `lines` gets what guests and Firecracker write, as JSON lines with their source. `reach`
    is called between steps, so that tests can crash there.
    """

    def __init__(
        self,
        config: FirecrackerConfig,
        net: HostNet,
        *,
        gate: Gate | None = None,
        lines: console.Lines | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._net = net
        self._gate = gate or Gate(SPAWN_WIDTH)
        self._lines = lines
        self._reach = reach
        self._logs = Path(config.state_dir) / "logs"
        self._cgroups = limits.detect() if config.use_cgroups else limits.Cgroups(0, {}, "switched off")
        if self._cgroups.version == 0:
            log.warning("microVMs get no limits besides their own size: %s", self._cgroups.reason)
        self._watcher = Watcher("firecracker")
        self._output = Output(console.passing(lines), config.live_log_bytes, "firecracker")
        self._templates = Templates(config.chroot_base)
        self._turns = Turns()
        self._apis: dict[str, Api] = {}
        self._children: set[str] = (
            set()
        )  # machines we started ourselves: their processes need no further proof

    @property
    def backend(self) -> str:
        """Return `firecracker`."""
        return "firecracker"

    def prewarm(self) -> None:
        """Begin to make the overlay templates of every configured size, in the background."""
        self._templates.prewarm({label_set.overlay_mib for label_set in self.config.label_sets})

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        """Return where its directory and cgroups will be, what it is on the network, and under which boot."""
        del scaler
        self._label_set(labels)
        found = paths.of(self.config.chroot_base, vm)
        if lease is None:
            raise DriverError("refused", "a microVM needs an address: give microvm_network", transient=False)
        return {
            "version": 1,
            "boot_id": process.boot_id(),
            "chroot_base": self.config.chroot_base,
            "directory": str(found.directory),
            "uid": self.config.uid,
            "gid": self.config.gid,
            "lease": msgspec.to_builtins(lease),
            "cgroups": limits.directories(self._cgroups, self.config.owner, vm),
            "logs": str(self._logs),
        }

    def spawn(self, order: SpawnOrder, abort: Abort) -> Handle:
        """Bring the machine up; the handle comes when Firecracker has accepted its start."""
        label_set, lease = self._label_set(order.labels), _lease(order.placement)
        with self._turns.spawning(order.vm, abort) as called_off:
            if called_off.is_set():
                raise DriverError("aborted", "called off before it was begun", transient=True)
            what = wanted(self.config, order, label_set, lease)
            template = self._templates.get(label_set.overlay_mib, called_off)
            with self._gate.passed(called_off):
                return self._bring_up(what, template, called_off)

    def _bring_up(self, what: Wanted, template: Path, abort: Abort) -> Handle:
        order, found = what.order, self._paths(what.order.vm, what.order.placement)
        bringup = Bringup(self.config, found, what, abort, self._reach)
        bringup.make_chroot(template)
        watched = bringup.start(self._watcher, self._cgroups)
        self._children.add(order.vm)
        # While the jailer is on its way to the API: the guest is not started, and nothing opens the TAP before that.
        self._net.attach(what.lease, what.label_set.policy, self.config.uid, self.config.gid)
        self._reach("firecracker.spawn.network")
        api = self._apis[order.vm] = Api(found.socket, abort)
        self._follow(found)
        try:
            bringup.configure(api, watched)
        except DriverError:
            if self._lines is not None and watched.end is not None and not abort.is_set():
                code = watched.end.exit_code
                self._lines(
                    order.vm,
                    console.boot_failed(order.vm, code, boot_failure.classify_file(found.serial_log)),
                )
            raise
        api.heed(None)
        return self._handle(order.placement, found, watched.pid, watched.start_ticks)

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Say what is provable. Without a handle only a machine whose guest was started counts as running."""
        found = self._paths(vm, placement)
        try:
            seen = sighting.look(found, placement, handle, self._child(vm))
        except OSError as error:
            return Found(presence="unknown", evidence=f"the host could not be asked: {error}")
        probe, presence, evidence = seen.probe, _presence(seen), seen.evidence
        if presence == "running" and handle is None:
            presence, state = self._started(found)
            evidence += f"; {state}"
        if presence != "running" or probe.pid is None or probe.start_ticks is None:
            return Found(presence=presence, evidence=evidence)
        known = handle or self._handle(placement, found, probe.pid, probe.start_ticks)
        return Found(presence=presence, evidence=evidence, handle=known)

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Tell the end of the machine; also takes up the logs of one that an earlier coordinator started."""
        found = self._paths(vm, placement)

        def tell(how: Exit) -> None:
            what = boot_failure.classify_file(found.serial_log)
            detail = how.detail if what == "unknown" else f"{how.detail}; the console says {what}"
            ended(Exit(exit_code=how.exit_code, detail=detail))

        try:
            seen = sighting.look(found, placement, handle, self._child(vm))
        except OSError as error:
            # No evidence of an end: held by its number, so that its end is told whatever it is.
            doubt = f"it could not be looked at: {error}"
            seen = Sighting(Probe("unconfirmed", handle.data.get("pid"), None, doubt), ())
        known = self._watcher.get(vm) is not None  # its exit code may wait to be told
        held = known or (not identity.may_delete(seen.probe) and self._hold(vm, seen.probe))
        if held and found.directory.exists():
            self._follow(found)
        if not held or not self._watcher.on_end(vm, tell):
            tell(Exit(exit_code=None, detail="it had ended before we looked; nobody collected its exit code"))

    def destroy(self, vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
        """End the machine, and take rules, TAP, cgroups and chroot away; the chroot last, and only from the dead."""
        found = self._paths(vm, placement)
        with self._turns.ending(vm):
            try:
                seen = sighting.look(found, placement, handle, self._child(vm))
                if not identity.may_signal(seen.probe) and not identity.may_delete(seen.probe):
                    raise DriverError(
                        "still-there", f"not signalled without proof: {seen.evidence}", transient=True
                    )
                ending = self._end(vm, found, seen, abort)
                self._reach("firecracker.destroy.ended")
                # Without traces an earlier teardown came through, and the address may be another's by now.
                if seen.traces and placement["lease"] is not None:
                    self._net.release(_lease(placement))
                teardown.remove_cgroups(placement.get("cgroups", []))
                self._reach("firecracker.destroy.network")
                self._finish(vm, found, Path(placement["logs"]))
                self._chroot(found, placement).remove()
                left = sighting.look(found, placement, handle, None)
            except OSError as error:
                raise DriverError(
                    "unknown", f"the host could not be asked: {error}", transient=True
                ) from error
        if left.traces or not identity.may_delete(left.probe):
            raise DriverError("still-there", f"after its teardown: {left.evidence}", transient=True)
        return f"{ending}; rules, TAP, cgroups and chroot removed; {left.evidence}"

    def clear_bootstrap(self, vm: str, placement: dict[str, Any], handle: Handle) -> None:
        """Leave nothing for the guest to read in the metadata service, and let go of the API."""
        del handle
        try:
            self._api(vm, self._paths(vm, placement)).clear_metadata()
        except ApiError as error:
            log.warning("the metadata of %s could not be cleared: %s", vm, error)
        self._close_api(vm)

    def survey(self) -> tuple[Resource, ...]:
        """List the directories and the cgroups of all owners."""
        listed: list[Resource] = []
        try:
            top = paths.machines(self.config.chroot_base)
            for path in sorted(top.iterdir()) if top.exists() else []:
                vm = path.name.removeprefix(".new-")
                if not paths.is_vm(vm):
                    continue
                mark = self._chroot(Paths(self.config.chroot_base, vm), {}).mark()
                owner = mark.owner if mark is not None else None
                detail = f"scaler {mark.scaler}" if mark is not None else "without a mark"
                listed.append(Resource(kind="chroot", name=str(path), vm=vm, owner=owner, detail=detail))
            for owner, vm, directory in limits.listing(self._cgroups):
                listed.append(Resource(kind="cgroup", name=directory, vm=vm, owner=owner))
        except OSError as error:
            raise DriverError("unknown", f"the listing is partial: {error}", transient=True) from error
        return tuple(listed)

    def log_tail(self, vm: str, placement: dict[str, Any], lines: int) -> tuple[str, ...]:
        """Return the last lines of the console, of a running machine or of one whose log was kept."""
        live = self._paths(vm, placement).serial_log
        return last_lines(live if live.exists() else Path(placement["logs"]) / f"{vm}.log", lines)

    def close(self) -> None:
        """Let go; machines run on."""
        for vm in list(self._apis):
            self._close_api(vm)
        self._watcher.close()
        self._output.close()
        limits.remove_parents(self._cgroups, self.config.owner)  # those of running machines are not empty

    def _end(self, vm: str, found: Paths, seen: Sighting, abort: Abort) -> str:
        if not identity.may_signal(seen.probe):
            return seen.probe.detail
        if not self._hold(vm, seen.probe):
            return "it had ended"
        watched = self._watcher.get(vm)
        assert watched is not None, "just held"
        cfg = self.config
        api = self._api(vm, found) if seen.probe.state == "confirmed" else None
        bounds = teardown.Bounds(cfg.stop_grace_s, cfg.kill_wait_s, cfg.use_sudo, cfg.uid)
        return teardown.end(watched, api, bounds, abort)

    def _child(self, vm: str) -> Watched | None:
        return self._watcher.get(vm) if vm in self._children else None

    def _hold(self, vm: str, probe: Probe) -> bool:
        """Hold the process by a pidfd if we do not yet; False when it is not there (any more).

        Held is not proven: whoever signals asks `identity.may_signal` of a fresh look.
        """
        if self._watcher.get(vm) is not None:
            return True
        if not process.legal(probe.pid) or probe.pid is None:
            return False
        pidfd = process.open_pidfd(probe.pid)
        if pidfd is None:
            return False
        # Read again with the pidfd open: the number looked at just before may have become another's in between.
        again = identity.look(probe.pid, Path("/"), recorded_ticks=probe.start_ticks)
        if identity.may_delete(again):
            os.close(pidfd)
            return False
        self._watcher.add(vm, probe.pid, probe.start_ticks or again.start_ticks or 0, pidfd)
        return True

    def _finish(self, vm: str, found: Paths, logs: Path) -> None:
        """Let nothing of the process or its words be lost: exit code collected, last lines passed on, log kept."""
        watched = self._watcher.get(vm)
        if watched is not None:
            watched.over.wait(_COLLECT_WAIT_S)
        self._watcher.forget(vm)
        self._children.discard(vm)
        self._close_api(vm)
        self._output.finish(console.key(vm, "firecracker-serial"))
        self._output.finish(console.key(vm, "firecracker-vmm"))
        if self._lines is not None:
            for line in last_lines(found.stderr_log, _LAST_WORDS):
                self._lines(vm, console.formed(line, vm, "firecracker-vmm"))
        keep_log(found.serial_log, logs / f"{vm}.log", self.config.kept_log_bytes)
        trim_logs(logs, self.config.kept_logs)

    def _follow(self, found: Paths) -> None:
        serial, vmm = (
            console.key(found.vm, "firecracker-serial"),
            console.key(found.vm, "firecracker-vmm"),
        )
        self._output.follow(serial, found.serial_log, found.serial_offset)
        self._output.follow(vmm, found.vmm_log, found.vmm_offset)

    def _started(self, found: Paths) -> tuple[Presence, str]:
        """Ask Firecracker whether the guest was started: one that was cut off before is half-made."""
        api = Api(found.socket, timeout_s=_ASK_TIMEOUT_S)
        try:
            state = str(api.instance().get("state"))
        except ApiError as error:
            # A running one always listens; what else keeps us from asking is no evidence.
            listens = not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
            return ("unknown" if listens else "half-made"), f"its API could not be asked: {error}"
        finally:
            api.close()
        return ("half-made" if state == "Not started" else "running"), f"Firecracker says {state}"

    def _api(self, vm: str, found: Paths) -> Api:
        return self._apis.setdefault(vm, Api(found.socket, timeout_s=_ASK_TIMEOUT_S))

    def _close_api(self, vm: str) -> None:
        api = self._apis.pop(vm, None)
        if api is not None:
            api.close()

    def _handle(self, placement: dict[str, Any], found: Paths, pid: int, start_ticks: int) -> Handle:
        device, node = identity.inode(found.chroot) or (None, None)
        data = {
            "pid": pid,
            "start_ticks": start_ticks,
            "boot_id": placement["boot_id"],
            "chroot": str(found.chroot),
            "root_device": device,
            "root_inode": node,
            "log": str(found.serial_log),
        }
        return Handle(driver=self.backend, version=HANDLE_VERSION, data=data)

    def _chroot(self, found: Paths, placement: dict[str, Any]) -> Chroot:
        uid, gid = placement.get("uid", self.config.uid), placement.get("gid", self.config.gid)
        return Chroot(found, uid, gid, sudo=self.config.use_sudo)

    def _paths(self, vm: str, placement: dict[str, Any]) -> Paths:
        return Paths(placement["chroot_base"], vm)

    def _label_set(self, labels: tuple[str, ...]) -> LabelSet:
        wanted_labels = {label.lower() for label in labels}
        for label_set in self.config.label_sets:
            if {label.lower() for label in label_set.labels} == wanted_labels:
                return label_set
        raise DriverError(
            "missing", f"no label set {sorted(wanted_labels)} is configured here", transient=False
        )


def _lease(placement: dict[str, Any]) -> Lease:
    """Return its address."""
    return msgspec.convert(placement["lease"], Lease)


def _presence(seen: Sighting) -> Presence:
    match seen.probe.state:
        case "confirmed":
            return "running"
        case "launching":
            return "half-made"
        case "unconfirmed":
            return "unknown"
        case "gone":
            return "half-made" if seen.traces else "absent"

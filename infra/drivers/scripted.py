"""A driver that does what a test tells it, on a host that is a dictionary and outlives the coordinator."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.decisions.addresses import Lease
from actors.driver import Abort, Exit, Found, Presence, Resource, SpawnOrder
from actors.errors import DriverError
from events.vm import Handle

BOOT = "scripted-boot-1"

State = Literal["half-made", "running", "ended"]
CallName = Literal["plan", "spawn", "inspect", "watch", "destroy", "survey", "log_tail"]


@dataclass
class Machine:
    """One machine on the virtual host."""

    vm: str
    owner: str | None
    state: State
    pid: int
    boot_id: str
    exit: Exit | None = None
    output: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Script:
    """What one spawn and one life do.

    `block` holds the spawn until it is set or the spawn is aborted. `spawn_error` makes it fail, after
    `spawn_leaves` was left behind. `exits` ends the machine right after its spawn. The first
    `teardown_failures` destroys raise `teardown_error`.
    """

    block: threading.Event | None = None
    spawn_error: DriverError | None = None
    spawn_leaves: State | None = "half-made"
    exits: Exit | None = None
    teardown_failures: int = 0
    teardown_error: DriverError = field(
        default_factory=lambda: DriverError(
            "still-there", "scripted: the machine is still there", transient=True
        )
    )
    inspect: Found | None = None
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call the driver received."""

    name: CallName
    vm: str


class VirtualHost:
    """What is on the host. It outlives drivers as a real host outlives coordinators. Thread-safe."""

    def __init__(self) -> None:
        self.boot_id = BOOT
        self.machines: dict[str, Machine] = {}
        self.scripts: dict[str, Script] = {}  # here, so that a restarted coordinator finds them unchanged
        self.teardowns_failed: Counter[str] = Counter()
        self._watches: dict[str, list[tuple[object, Callable[[Exit], None]]]] = {}
        self._next_pid = 1000
        self._lock = threading.RLock()

    def put(self, vm: str, state: State, owner: str | None) -> Machine:
        """Put a machine there, or move the one that is there to `state`."""
        with self._lock:
            machine = self.machines.get(vm)
            if machine is None:
                self._next_pid += 1
                machine = Machine(vm=vm, owner=owner, state=state, pid=self._next_pid, boot_id=self.boot_id)
                self.machines[vm] = machine
            machine.state = state
            return machine

    def end(self, vm: str, exit_code: int | None = 0, detail: str = "") -> None:
        """End a running machine by itself; watchers are told before this returns, in the caller's thread."""
        with self._lock:
            machine = self.machines[vm]
            assert machine.state == "running", f"{vm} is {machine.state}, so it cannot end"
            machine.state = "ended"
            machine.exit = Exit(exit_code=exit_code, detail=detail)
            told = [ended for _, ended in self._watches.pop(vm, [])]
            how = machine.exit
        for ended in told:
            ended(how)

    def remove(self, vm: str) -> None:
        """Take every trace of a machine away, telling nobody."""
        with self._lock:
            self.machines.pop(vm, None)
            self._watches.pop(vm, None)

    def reboot(self, boot_id: str = "scripted-boot-2") -> None:
        """Lose every process; traces stay half-made. Nobody is told, as nobody is there to hear it."""
        with self._lock:
            self.boot_id = boot_id
            self._watches.clear()
            for machine in self.machines.values():
                machine.state = "half-made"

    def watch(self, vm: str, by: object, ended: Callable[[Exit], None]) -> None:
        """Tell `ended` once when the machine ends, at once if it has."""
        with self._lock:
            machine = self.machines.get(vm)
            if machine is not None and machine.state == "running":
                self._watches.setdefault(vm, []).append((by, ended))
                return
            how = machine.exit if machine is not None and machine.exit is not None else Exit(exit_code=None)
        ended(how)

    def forget(self, by: object) -> None:
        """Drop the watches of a driver that closed or whose coordinator was killed; machines run on."""
        with self._lock:
            for vm in list(self._watches):
                kept = [watch for watch in self._watches[vm] if watch[0] is not by]
                self._watches[vm] = kept


class ScriptedDriver:
    """A `Driver` for tests: deterministic, without threads of its own, and with every call on record.

    `script` gives the script of a spawn; `reach` is called between the steps of spawn and destroy, so that a
    test can crash the coordinator there by raising. A second driver over the same host is a coordinator after
    its restart.
    """

    def __init__(
        self,
        host: VirtualHost | None = None,
        *,
        owner: str = "c1",
        backend: str = "bare-metal",
        script: Callable[[str], Script] | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.host = VirtualHost() if host is None else host
        self.owner = owner
        self.calls: list[Call] = []
        self.plan_error: DriverError | None = None
        self.survey_error: DriverError | None = None
        self._backend = backend
        self._script = script or (lambda _: Script())
        self._next: list[Script] = []
        self._reach = reach
        self._lock = threading.Lock()

    @property
    def backend(self) -> str:
        """Return the backend type it stands for."""
        return self._backend

    def next(self, *scripts: Script) -> None:
        """Give the coming spawns these scripts, one each, whatever their ids."""
        with self._lock:
            self._next.extend(scripts)

    def set(self, vm: str, script: Script) -> None:
        """Give this machine a script; replaces the one it has."""
        with self._lock:
            self.host.scripts[vm] = script

    def count(self, name: CallName, vm: str | None = None) -> int:
        """Return how often a call came, for one machine or for all."""
        return sum(1 for call in self.calls if call.name == name and vm in (None, call.vm))

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        """Return a placement with the virtual host's boot id."""
        self._record("plan", vm)
        if self.plan_error is not None:
            raise self.plan_error
        address = None if lease is None else lease.address
        return {"boot_id": self.host.boot_id, "scaler": scaler, "labels": list(labels), "address": address}

    def spawn(self, order: SpawnOrder, abort: Abort) -> Handle:
        """Do what the script says."""
        self._record("spawn", order.vm)
        script = self._of(order.vm, take_next=True)
        if abort.is_set():
            raise DriverError("aborted", "scripted: called off before it began", transient=True)
        self._reach("scripted.spawn.begin")
        leaves = script.spawn_leaves if script.spawn_error is not None else "half-made"
        if leaves is not None:
            self.host.put(order.vm, leaves, self.owner)
        self._reach("scripted.spawn.half-made")
        while script.block is not None and not script.block.is_set():
            if abort.wait(0.002):
                raise DriverError("aborted", "scripted: called off while it was starting", transient=True)
        if script.spawn_error is not None:
            raise script.spawn_error
        machine = self.host.put(order.vm, "running", self.owner)
        machine.environment.update(order.environment)
        machine.output.extend(script.output)
        self._reach("scripted.spawn.running")
        if script.exits is not None:
            self.host.end(order.vm, script.exits.exit_code, script.exits.detail)
        return self._handle(machine)

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Say what is on the virtual host, or what the script says of it."""
        self._record("inspect", vm)
        scripted = self._of(vm).inspect
        if scripted is not None:
            return scripted
        machine = self.host.machines.get(vm)
        if machine is None:
            return Found(presence="absent", evidence="scripted: not on the virtual host")
        proven = handle is None or handle.data.get("pid") == machine.pid
        same_boot = placement.get("boot_id") == self.host.boot_id
        presence: Presence = "half-made"
        if machine.state == "running" and same_boot:
            presence = "running" if proven else "foreign"
        return Found(
            presence=presence,
            evidence=f"scripted: {machine.state}, pid {machine.pid}, boot {machine.boot_id}",
            handle=self._handle(machine) if presence == "running" else None,
        )

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Tell `ended` when the host ends the machine."""
        del placement, handle
        self._record("watch", vm)
        self.host.watch(vm, self, ended)

    def destroy(self, vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
        """Take it off the virtual host, after as many failures as the script wants."""
        del placement, handle, abort
        self._record("destroy", vm)
        script = self._of(vm)
        self._reach("scripted.destroy.begin")
        if self.host.teardowns_failed[vm] < script.teardown_failures:
            self.host.teardowns_failed[vm] += 1
            raise script.teardown_error
        self.host.remove(vm)
        self._reach("scripted.destroy.gone")
        return "scripted: the virtual host has no trace of it"

    def clear_bootstrap(self, vm: str, placement: dict[str, Any], handle: Handle) -> None:
        """Do nothing: nothing is left where the machine could read it."""

    def survey(self) -> tuple[Resource, ...]:
        """List the virtual host's machines."""
        self._record("survey", "")
        if self.survey_error is not None:
            raise self.survey_error
        return tuple(
            Resource(
                kind="machine", name=machine.vm, vm=machine.vm, owner=machine.owner, detail=machine.state
            )
            for machine in self.host.machines.values()
        )

    def log_tail(self, vm: str, placement: dict[str, Any], lines: int) -> tuple[str, ...]:
        """Return what the script said the machine wrote."""
        del placement
        self._record("log_tail", vm)
        machine = self.host.machines.get(vm)
        return tuple(machine.output[-lines:]) if machine is not None and lines > 0 else ()

    def close(self) -> None:
        """Forget its watches; also what a killed coordinator leaves behind. Repeatable."""
        self.host.forget(self)

    def _of(self, vm: str, *, take_next: bool = False) -> Script:
        with self._lock:
            known = self.host.scripts.get(vm)
            if known is None and take_next:
                known = self.host.scripts[vm] = self._next.pop(0) if self._next else self._script(vm)
            return known or self._script(vm)

    def _record(self, name: CallName, vm: str) -> None:
        self.calls.append(Call(name, vm))

    def _handle(self, machine: Machine) -> Handle:
        return Handle(driver=self._backend, version=1, data={"pid": machine.pid, "boot_id": machine.boot_id})

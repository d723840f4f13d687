"""The drivers under the contract, each with the means to end, survey and break its machines from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.decisions.addresses import Lease
from actors.driver import Driver, Exit, Resource, SpawnOrder
from actors.errors import DriverError
from events.envelope import Resources
from events.vm import Handle
from infra.drivers.bare_metal import BareMetalConfig, BareMetalDriver, LabelSet
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.scripted import Script, ScriptedDriver, VirtualHost
from infra.host_process import process
from tests.integration.firecracker_site import Site

LABELS = ("linux", "contract")
DEADLINE_S = 20.0


def wait_until(true: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; fail naming it when it does not come."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"waited {deadline_s} s for: {what}"
        time.sleep(0.005)


class Ends:
    """Collects what a watch tells."""

    def __init__(self) -> None:
        self.told: list[Exit] = []
        self._event = threading.Event()

    def __call__(self, how: Exit) -> None:
        """Take it."""
        self.told.append(how)
        self._event.set()

    def wait(self) -> Exit:
        """Return the first end, waiting for it."""
        assert self._event.wait(DEADLINE_S), "the watch told nothing"
        return self.told[0]


def order(vm: str, placement: dict[str, Any], **environment: str) -> SpawnOrder:
    """Return an order for a machine of the contract's label set."""
    return SpawnOrder(
        vm=vm, scaler="pool", labels=LABELS, placement=placement, environment=environment, limits=Resources()
    )


class Rig(ABC):
    """One host with one driver on it, and a second one after a restart. `owner` is the drivers' coordinator."""

    owner = f"rig-{os.getpid()}"
    end_code = 3
    """How its machines end by themselves."""

    def survey(self, driver: Driver) -> list[Resource]:
        """Return what the driver lists of ours; the host may have other coordinators."""
        return [found for found in driver.survey() if found.owner in (self.owner, None)]

    @abstractmethod
    def driver(self) -> Driver:
        """Return a new driver instance on the same host."""

    @abstractmethod
    def end_by_itself(self, vm: str, handle: Handle) -> None:
        """Make the machine end with `end_code`, without the driver."""

    @abstractmethod
    def refuse_spawn(self, driver: Driver, vm: str) -> None:
        """Let the next spawn of this machine fail for good."""

    @abstractmethod
    def block_spawn(self, driver: Driver, vm: str) -> None:
        """Let the next spawn of this machine take until it is aborted."""

    @abstractmethod
    def leave_half_made(self, vm: str, placement: dict[str, Any]) -> None:
        """Leave what a spawn leaves that was cut off by a crash before its process ran."""

    @abstractmethod
    def runs(self, handle: Handle) -> bool:
        """Tell whether the machine runs, without asking the driver."""

    @abstractmethod
    def impostor(self, handle: Handle) -> tuple[Handle, Callable[[], bool]]:
        """Return a handle whose process number now belongs to a stranger, and whether the stranger still lives."""

    @abstractmethod
    def close(self) -> None:
        """Take down what the test left."""


class ScriptedRig(Rig):
    """The scripted driver on its virtual host."""

    def __init__(self) -> None:
        self.host = VirtualHost()

    def driver(self) -> ScriptedDriver:
        return ScriptedDriver(self.host, owner=self.owner)

    def end_by_itself(self, vm: str, handle: Handle) -> None:
        self.host.end(vm, 3)

    def refuse_spawn(self, driver: Driver, vm: str) -> None:
        assert isinstance(driver, ScriptedDriver)
        driver.set(
            vm, Script(spawn_error=DriverError("missing", "scripted: no such binary", transient=False))
        )

    def block_spawn(self, driver: Driver, vm: str) -> None:
        assert isinstance(driver, ScriptedDriver)
        driver.set(vm, Script(block=threading.Event()))

    def leave_half_made(self, vm: str, placement: dict[str, Any]) -> None:
        self.host.put(vm, "half-made", self.owner)

    def runs(self, handle: Handle) -> bool:
        return any(m.pid == handle.data["pid"] and m.state == "running" for m in self.host.machines.values())

    def impostor(self, handle: Handle) -> tuple[Handle, Callable[[], bool]]:
        stranger = self.host.put("stranger", "running", None)
        data = {"pid": stranger.pid, "boot_id": stranger.boot_id}
        return Handle(driver=handle.driver, version=1, data=data), lambda: stranger.state == "running"

    def close(self) -> None:
        self.host.machines.clear()


AGENT = """#!/bin/sh
trap 'exit 3' USR1
echo > ready
while :; do sleep 60 & wait; done
"""
STUCK_SHELL = """#!/bin/sh
kill -STOP $$
"""


class BareMetalRig(Rig):
    """The bare-metal driver on this host, with real processes."""

    cgroup: Literal["auto", "none"] = "auto"

    def __init__(self, state: Path) -> None:
        self.state = state
        self.agent = _script(state / "agent", AGENT)
        self._strangers: list[subprocess.Popen[bytes]] = []
        self._drivers: list[BareMetalDriver] = []

    def config(self) -> BareMetalConfig:
        return BareMetalConfig(
            owner=self.owner,
            state_dir=str(self.state / "state"),
            label_sets=(LabelSet(labels=LABELS, binary_path=str(self.agent)),),
            cgroup=self.cgroup,
        )

    def driver(self) -> BareMetalDriver:
        made = BareMetalDriver(self.config())
        self._drivers.append(made)
        return made

    def end_by_itself(self, vm: str, handle: Handle) -> None:
        ready = Path(handle.data["log"]).parent / "work" / "ready"
        wait_until(ready.exists, "the agent is ready")
        os.kill(handle.data["pid"], signal.SIGUSR1)

    def refuse_spawn(self, driver: Driver, vm: str) -> None:
        self.agent.unlink()

    def block_spawn(self, driver: Driver, vm: str) -> None:
        assert isinstance(driver, BareMetalDriver)
        shell = _script(self.state / "stuck", STUCK_SHELL)
        driver.config = msgspec.structs.replace(driver.config, shell=str(shell))
        if driver.nursery_pid is not None:
            os.kill(driver.nursery_pid, signal.SIGSTOP)

    def leave_half_made(self, vm: str, placement: dict[str, Any]) -> None:
        class Crash(Exception):  # noqa: N818
            pass

        def reach(point: str) -> None:
            if point == "bare-metal.spawn.cgroup":
                raise Crash

        crashing = BareMetalDriver(self.config(), reach=reach)
        with suppress(Crash):
            crashing.spawn(order(vm, placement), threading.Event())
        crashing.close()

    def runs(self, handle: Handle) -> bool:
        stat = process.stat(handle.data["pid"])
        return stat is not None and not stat.ended and stat.start_ticks == handle.data["start_ticks"]

    def impostor(self, handle: Handle) -> tuple[Handle, Callable[[], bool]]:
        stranger = stranger_process(handle)
        self._strangers.append(stranger)
        data = {**handle.data, "pid": stranger.pid}
        return Handle(driver=handle.driver, version=1, data=data), lambda: stranger.poll() is None

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.kill()
            stranger.wait()
        last = self.driver()
        left = {
            resource.vm
            for resource in last.survey()
            if resource.owner == self.owner or resource.kind == "directory"
        }
        for vm in left:
            assert vm is not None
            last.destroy(vm, last.plan(vm, "pool", LABELS), None, threading.Event())
        for driver in self._drivers:
            driver.close()
        last.teardown_host()


class ProcessGroupRig(BareMetalRig):
    """The same on a host where no cgroup is to be had."""

    cgroup: Literal["auto", "none"] = "none"


class FirecrackerRig(Rig):
    """The Firecracker driver with real, jailed microVMs in a network namespace of the rig's own."""

    end_code = -signal.SIGKILL

    def __init__(self) -> None:
        self.site = Site(owner=self.owner)
        self._strangers: list[subprocess.Popen[bytes]] = []

    def driver(self) -> FirecrackerDriver:
        made = _Leasing(self.site.config(), self.site.net)
        made.site = self.site
        self.site.drivers.append(made)
        return made

    def end_by_itself(self, vm: str, handle: Handle) -> None:
        os.kill(handle.data["pid"], signal.SIGKILL)

    def refuse_spawn(self, driver: Driver, vm: str) -> None:
        self.site.kernel.unlink()

    def block_spawn(self, driver: Driver, vm: str) -> None:
        assert isinstance(driver, FirecrackerDriver)
        jailer = _script(self.site.root / "stuck", STUCK_SHELL)
        driver.config = msgspec.structs.replace(driver.config, jailer_path=str(jailer))

    def leave_half_made(self, vm: str, placement: dict[str, Any]) -> None:
        class Crash(Exception):  # noqa: N818
            pass

        def reach(point: str) -> None:
            if point == "firecracker.spawn.network":
                raise Crash

        crashing = self.site.driver(reach)
        with suppress(Crash):
            crashing.spawn(order(vm, placement), threading.Event())
        crashing.close()

    def runs(self, handle: Handle) -> bool:
        stat = process.stat(handle.data["pid"])
        return stat is not None and not stat.ended and stat.start_ticks == handle.data["start_ticks"]

    def impostor(self, handle: Handle) -> tuple[Handle, Callable[[], bool]]:
        stranger = stranger_process(handle)
        self._strangers.append(stranger)
        data = {**handle.data, "pid": stranger.pid}
        return Handle(driver=handle.driver, version=1, data=data), lambda: stranger.poll() is None

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.kill()
            stranger.wait()
        self.site.close()


class _Leasing(FirecrackerDriver):
    """Plans every machine with an address: the contract asks all drivers alike, and knows of none."""

    site: Site

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        return super().plan(vm, scaler, labels, lease or self.site.lease(vm))


def stranger_process(handle: Handle) -> subprocess.Popen[bytes]:
    """Start a process that did not start in the same clock tick as the handle's."""
    while True:
        made = subprocess.Popen(["sleep", "600"], start_new_session=True)
        stat = process.stat(made.pid)
        assert stat is not None
        if stat.start_ticks != handle.data["start_ticks"]:
            return made
        made.kill()
        made.wait()


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path

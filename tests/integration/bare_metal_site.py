"""A place on this host for bare-metal tests: real processes, and a look at the host for what is left of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil

from actors.driver import Resource, SpawnOrder
from events.envelope import Resources
from events.vm import Handle
from infra.drivers.bare_metal import BareMetalConfig, BareMetalDriver, LabelSet
from infra.host_process.cgroup import mounts
from tests.contract.driver_rigs import wait_until

LABELS = ("metal",)
OWNER = f"site-{os.getpid()}"
VM = "vm-01"


class Site:
    """One state directory, one agent program, any number of drivers one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.agent = root / "agent"
        self.config = BareMetalConfig(
            owner=OWNER,
            state_dir=str(root / "state"),
            label_sets=(LabelSet(labels=LABELS, binary_path=str(self.agent)),),
            stop_grace_s=0.3,
        )
        self.drivers: list[BareMetalDriver] = []
        self._before = {
            child.pid for child in psutil.Process().children(recursive=True)
        }  # servers of other tests

    def script(self, text: str) -> None:
        """Let the agent be this shell script."""
        self.agent.write_text(f"#!/bin/sh\n{text}\n")
        self.agent.chmod(0o755)

    def configure(self, **changes: Any) -> None:
        """Change the configuration of drivers to come."""
        self.config = msgspec.structs.replace(self.config, **changes)

    def label_set(self, **changes: Any) -> None:
        """Change the label set of drivers to come."""
        self.configure(label_sets=(msgspec.structs.replace(self.config.label_sets[0], **changes),))

    def driver(self, **options: Any) -> BareMetalDriver:
        """Return a new driver here."""
        made = BareMetalDriver(self.config, **options)
        self.drivers.append(made)
        return made

    def spawn(
        self, driver: BareMetalDriver, vm: str = VM, limits: Resources | None = None, **environment: str
    ) -> tuple[dict[str, Any], Handle]:
        """Plan and spawn a machine."""
        placement = driver.plan(vm, "pool", LABELS)
        order = SpawnOrder(
            vm=vm,
            scaler="pool",
            labels=LABELS,
            placement=placement,
            environment=environment,
            limits=limits or Resources(),
        )
        return placement, driver.spawn(order, threading.Event())

    def survey(self, driver: BareMetalDriver) -> list[Resource]:
        """Return what a driver lists of ours; the host may have other coordinators."""
        return [found for found in driver.survey() if found.owner in (OWNER, None)]

    def work(self, vm: str = VM) -> Path:
        """Return the working directory of a machine."""
        return self.root / "state" / "runs" / vm / "work"

    def wait_for(self, name: str, vm: str = VM) -> str:
        """Wait until the agent wrote this file in its working directory, and return its content."""
        path = self.work(vm) / name
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"the agent wrote {name}")
        return path.read_text().strip()

    def clean(self) -> None:
        """Take down what the test left, and close."""
        last = self.driver()
        mine = {r.vm for r in last.survey() if r.owner == OWNER or r.kind == "directory"}
        for vm in mine:
            assert vm is not None
            last.destroy(vm, last.plan(vm, "pool", LABELS), None, threading.Event())
        for driver in self.drivers:
            driver.close()
        last.teardown_host()

    def assert_nothing_is_left(self) -> None:
        """Look at the host itself, not at what a driver says of it."""
        kept = [
            path for path in (self.root / "state").rglob("*") if path.parent.name != "logs" and path.is_file()
        ]
        assert kept == []
        self.assert_no_process_is_left()
        for mount in (*mounts("cgroup2"), *mounts("cgroup")):
            assert not (mount.point / "fleetlog" / OWNER).exists()
        assert not any(str(self.root) in line for line in Path("/proc/self/mounts").read_text().splitlines())

    def assert_no_process_is_left(self) -> None:
        """Look at all processes of the host."""
        known = {*self._before, *(driver.nursery_pid for driver in self.drivers)}
        assert [p for p in psutil.Process().children(recursive=True) if p.pid not in known] == []
        strays = [
            p.info
            for p in psutil.process_iter(["pid", "cmdline"])
            if str(self.root) in str(p.info["cmdline"])
        ]
        assert strays == []


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""A coordinator with real jailed microVMs on a network of its own: how it is set up, asked, and what must not be left."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from actors.commands import Answer
from events import subjects
from events.envelope import Recorded
from infra.api.client import ApiClient
from infra.api.messages import DemandRequest, Needs
from infra.drivers.firecracker import identity, limits
from infra.host_process import process
from infra.journal.connection import NatsConnection
from infra.network.namespace import entered
from infra.network.policy import SETS
from projections.allocator import AllocatorState
from projections.allocator import evolve as evolve_allocator
from projections.allocator import evolve_vm as evolve_leases
from tests.acceptance.host import wait_until
from tests.acceptance.place import Place
from tests.guest.binaries import fetch_binaries
from tests.guest.build import build_guest
from tests.guest.rootfs import make_rootfs
from tests.needed import need_firecracker_host
from tests.network_site import NetworkSite, run

UID = 30_000
KINDS = {
    "quick": "print hello; sleep 20",
    "held": "wait",
    "deaf": "ignore-ctrl-alt-del; wait",
    "early": "exit-early",
    "mute": "never-register; wait",
}
"""Label, and what such a guest does: see tests/guest/README.md."""

TELL_TIMEOUT_S, TELL_AGAIN_S = 25.0, 3.0
_tellings = itertools.count(1)
NO_TABLES = ("--postgres", "none")


class MicrovmPlace(Place):
    """A place whose machines are microVMs, in the network namespace of a site. Made short: sockets have paths.

    `base` is the chroot base, the place's own unless two share one.
    """

    def __init__(
        self,
        site: NetworkSite,
        *,
        base: Path | None = None,
        tables: bool = False,
        network: Mapping[str, Any] | None = None,
        **scaler: Any,
    ) -> None:
        need_firecracker_host()
        self.site = site
        self.network = {"cidr": "10.44.0.0/24", "bridge": "flt-br0", "nft_table": "fleetlog"} | dict(
            network or {}
        )
        root = Path(tempfile.mkdtemp(prefix="flt"))
        root.chmod(0o755)  # PostgreSQL and the jailed run as users of their own
        self.base = base or root / "j"
        self.base.mkdir(exist_ok=True)  # another place may share it
        self.rootfs = make_rootfs(root / "rootfs.ext4")
        self.kernel = build_guest()
        self.binaries = fetch_binaries()
        self._tables = tables
        super().__init__(root, None, **scaler)

    def configure(self, **scaler: Any) -> None:
        """Write the fleet file: one scaler `vms` with a label set for every kind of guest."""
        self.write(self.scaler(**scaler))

    def write(self, *scalers: dict[str, Any], **fleet: Any) -> None:
        """Write a fleet file of these scalers."""
        content = {"version": 1, "microvm_network": self.network, "scalers": list(scalers)} | fleet
        self.config.write_text(yaml.safe_dump(content))

    def scaler(self, **changes: Any) -> dict[str, Any]:
        """Return a scaler; `kinds` are its guests and their steps, `sets` changes a kind's label set."""
        kinds: Mapping[str, str] = changes.pop("kinds", KINDS)
        sets: Mapping[str, Mapping[str, Any]] = changes.pop("sets", {})
        return {
            "name": "vms",
            "backend": "firecracker",
            "max_agents": 64,
            "max_concurrent_spawns": 32,
            "beat_every_s": 1,
            "heartbeat_grace_s": 4,
            "stop_grace_s": 1,
            "firecracker_path": str(self.binaries.firecracker),
            "jailer_path": str(self.binaries.jailer),
            "kernel_path": str(self.kernel),
            "uid": UID,
            "gid": UID,
            "chroot_base": str(self.base),
            "vcpus": 1,
            "mem_mib": 64,
            "label_sets": [self._label_set(kind, steps, sets.get(kind, {})) for kind, steps in kinds.items()],
        } | changes

    def _label_set(self, kind: str, steps: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "labels": [kind],
            "rootfs_path": str(self.rootfs),
            "overlay_mib": 16,
            "env": {"GUEST_TEST": steps, "SECRET": self.secret},
        } | dict(changes)

    @property
    def secret(self) -> str:
        """A value of every guest's environment that must never be written anywhere."""
        return f"s3cret-of-{self.id}"

    # Coordinator and commands, all inside the namespace.

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that runs in the namespace; not by `ip netns exec`, which hides the cgroups."""
        program, *rest = super().command(*arguments)
        tables = NO_TABLES if arguments[0] == "up" and not self._tables else ()
        return ["nsenter", f"--net={self.site.host}", program, *tables, *rest]

    def facts(self) -> list[Recorded]:
        """Read the whole log, without any coordinator."""
        with entered(self.site.host):
            return super().facts()

    @contextmanager
    def connected(self) -> Iterator[NatsConnection]:
        """Lend a connection to the coordinator's NATS."""
        with entered(self.site.host):
            connection = NatsConnection(self.address(), name="acceptance test")
        try:
            yield connection
        finally:
            connection.close()

    def answers(self, kind: str, count: int = 1, **limits_: Any) -> tuple[Answer, ...]:
        """Ask for agents over NATS, as a program does, and return what became of each."""
        with self.connected() as connection:
            request = DemandRequest(labels=(kind,), count=count, limits=Needs(**limits_))
            return ApiClient(connection, self.cluster).demand(request).answers

    def ask_for(self, kind: str, count: int = 1, **limits_: Any) -> list[str]:
        """Ask for agents and return their ids."""
        found = self.answers(kind, count, **limits_)
        assert all(answer.kind == "spawning" for answer in found), found
        return [str(answer.vm) for answer in found]

    def tell(self, vm: str, steps: str) -> None:
        """Have a running guest do steps besides its job; said again until it is heard.

        After a restart of NATS a guest may not be back yet.
        """
        mark = f"told {next(_tellings)}"
        ends_s = time.monotonic() + TELL_TIMEOUT_S
        while mark not in self.console(vm):
            assert time.monotonic() < ends_s, f"{vm} does not hear {steps!r}: {self.console(vm)}"
            with self.connected() as connection:
                connection.publish(f"{subjects.agent_inbox(vm)}.test", f"print {mark}; {steps}".encode())
            again_s = time.monotonic() + TELL_AGAIN_S
            while mark not in self.console(vm) and time.monotonic() < again_s:
                time.sleep(0.005)

    def wait_phases(self, vms: Iterable[str], phase: str, timeout_s: float = 25.0) -> None:
        """Wait until all of these are in the phase."""
        wanted = list(vms)
        self.wait_for(
            lambda lives: all(vm in lives and lives[vm].phase == phase for vm in wanted),
            f"{wanted} are {phase}",
            timeout_s,
        )

    # What the host shows, without asking the driver.

    def console(self, vm: str) -> str:
        """Return what a guest wrote, while it lives and after."""
        live = self.base / "firecracker" / vm / "serial.log"
        kept = self.data / "machines" / "microvms" / "logs" / f"{vm}.log"
        with suppress(FileNotFoundError):
            return live.read_text(errors="replace")
        return kept.read_text(errors="replace") if kept.exists() else ""

    def wait_console(self, vm: str, text: str, timeout_s: float = 15.0) -> None:
        """Wait until a guest has written the text."""
        wait_until(lambda: text in self.console(vm), f"{vm} says {text!r}: {self.console(vm)}", timeout_s)

    def microvms(self) -> dict[int, str]:
        """Return the jailers and Firecrackers of this chroot base, by their command lines and roots."""
        base = os.fsencode(self.base)
        roots = {identity.inode(self.base / "firecracker" / vm / "root"): vm for vm in self.chroots()}
        roots.pop(None, None)  # a directory just begun, and the root of a process just gone
        found = {}
        for pid in process.all_pids():
            with suppress(OSError):
                words = process.command_line(pid).split(b"\0")
                if base in words:
                    found[pid] = f"jailer of {words[words.index(b'--id') + 1].decode()}"
                elif identity.name_of(pid) == "firecracker":
                    vm = roots.get(identity.inode(Path(f"/proc/{pid}/root")))
                    if vm is not None:
                        found[pid] = vm
        return found

    def taps(self) -> list[str]:
        """Return the TAPs that are up and those that are on no bridge; idle ones are none of these."""
        links = json.loads(
            run("ip", "-j", "-d", "link", "show", "type", "tun", inside=self.site.host) or "[]"
        )
        mine = self._prefix()
        return [
            link["ifname"]
            for link in links
            if link["ifname"].startswith(mine)
            and ("UP" in link["flags"] or link.get("master") != self.network["bridge"])
        ]

    def _prefix(self) -> str:
        octets = self.network["cidr"].partition("/")[0].split(".")[:3]
        return "flt-" + "".join(f"{int(octet):02x}" for octet in octets)

    def policies(self) -> list[str]:
        """Return every element of every set that belongs to an address, as nft prints it."""
        found = []
        for each in SETS:
            place = ("nft", "-j", "list", "set", each.family, self.network["nft_table"], each.name)
            for entry in json.loads(run(*place, inside=self.site.host))["nftables"]:
                found += [f"{each.name} {element}" for element in entry.get("set", {}).get("elem", ())]
        return found

    def chroots(self) -> list[str]:
        """Return what is in the chroot base besides the overlay templates and what another place marked as its own."""
        machines = self.base / "firecracker"
        if not machines.exists():
            return []
        return sorted(path.name for path in machines.iterdir() if self._is_mine(path))

    def _is_mine(self, directory: Path) -> bool:
        try:
            mark = json.loads((directory / "mark.json").read_text())
        except FileNotFoundError:
            return directory.name != ".overlay-templates"
        return bool(mark["owner"] == self.id)

    def leases(self) -> dict[str, str]:
        """Return the addresses held, by the log."""
        state = AllocatorState()
        for fact in self.facts():
            if fact.aggregate.startswith("allocator."):
                state = evolve_allocator(state, fact.event, fact)
            elif fact.aggregate.startswith("vm."):
                state = evolve_leases(state, fact.event, fact)
        return state.leases

    def left(self) -> list[str]:
        """Return everything that a machine may leave on the host."""
        found = [f"process {pid} of {what}" for pid, what in self.microvms().items()]
        found += [f"TAP {tap}" for tap in self.taps()]
        found += [f"policy {element}" for element in self.policies()]
        found += [f"chroot {name}" for name in self.chroots()]
        found += [f"cgroup {path}" for owner, _, path in limits.listing(limits.detect()) if owner == self.id]
        return found

    def assert_nothing_is_left(self) -> None:
        """Look at the host and at the log: every life over, every address free, nothing on the host."""
        self.wait_for(lambda lives: not any(each.live for each in lives.values()), "all are reaped")
        leases, left = self.leases(), self.left()
        assert not leases, leases
        assert not left, left

    def assert_no_agent_is_left(self) -> None:
        """Look at the host itself."""
        left = self.left()
        assert not left, left

    def verify(self) -> None:
        """Require that `fleetlog verify` finds nothing."""
        done = self.run("--json", "verify")
        found = json.loads(done.stdout)
        assert found["differences"] == [], found
        assert [host["asked"] for host in found["hosts"]] == [True], found["hosts"]
        assert bool(found["views"]) == self._tables
        assert done.returncode == 0

    def settle(self) -> None:
        """End the test: everything as the log says, everything stopped, nothing left."""
        self.verify()
        self.assert_nothing_is_left()
        self.assert_one_machine_per_request()
        for coordinator in self.coordinators:
            if coordinator.process.poll() is None:
                coordinator.stop()

    def clean(self) -> None:
        """Take away whatever a test that failed left behind."""
        for coordinator in self.coordinators:
            if coordinator.process.poll() is None:
                coordinator.process.kill()
                coordinator.process.wait()
        for pid in self.microvms():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.microvms(), "what was killed is gone")
        super().clean()
        found = limits.detect()
        for owner, _, path in limits.listing(found):
            if owner == self.id:
                with suppress(OSError):
                    Path(path).rmdir()
        limits.remove_parents(found, self.id)
        shutil.rmtree(self.root, ignore_errors=True)

"""A whole small world for guests: a network of its own, a real NATS on it, a door with a scripted front door."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from events import subjects
from infra.embedded.nats_server import NatsOptions
from tests.conftest import NatsServer
from tests.guest.binaries import fetch_binaries
from tests.guest.build import build_guest
from tests.guest.microvm import MicroVm
from tests.guest.segment import Segment
from tests.integration.agent_site import Site

LABELS = ("linux", "kvm")
_CLUSTER = "guests"


class GuestSite:
    """What `guest_site` gives. `server` is the NATS, `door` what agents of machines meet, `front` what it is told."""

    def __init__(self, segment: Segment, server: NatsServer, site: Site, directory: Path) -> None:
        self.segment = segment
        self.server = server
        self.agents = site
        self.front = site.front
        self.machines: list[MicroVm] = []
        self._directory = directory

    def machine(self, vm: str, *, jailed: bool = False) -> MicroVm:
        """Return a machine that may register, not started yet."""
        self.front.known.add(vm)
        directory = self._directory / vm
        directory.mkdir()
        machine = MicroVm(self.segment, directory, vm, jailed=jailed)
        self.machines.append(machine)
        return machine

    def metadata(self, vm: str, test: str = "", *, ttl_s: float = 3600) -> Mapping[str, str]:
        """Return what a driver puts into a machine's metadata, and what the test wants of the guest."""
        access = dataclasses.replace(
            self.agents.access(ttl_s=ttl_s, bearer=True),
            nats_url=f"nats://{self.segment.gateway}:{self.server.port}",
        )
        return {**access.environment(vm, LABELS), **({"test": test} if test else {})}

    def boot(self, vm: str, test: str = "", *, jailed: bool = False) -> MicroVm:
        """Start a machine whose guest does what `test` says."""
        machine = self.machine(vm, jailed=jailed)
        machine.boot(self.metadata(vm, test))
        return machine

    def tell(self, vm: str, steps: str) -> None:
        """Have a running guest do steps besides its job."""
        self.agents.connection.publish(f"{subjects.agent_inbox(vm)}.test", steps.encode())

    def lines_of(self, vm: str) -> list[str]:
        """Return the log lines that came over NATS."""
        return [line for of, line in list(self.agents.lines) if of == vm]


@contextlib.contextmanager
def guest_site(directory: Path) -> Iterator[GuestSite]:
    """Make the world, and be inside its network until it ends: nothing of it is reachable from outside."""
    fetch_binaries()  # while there still is a way to the package index
    build_guest()
    with Segment() as segment, segment.entered():
        server = NatsServer(directory / "nats", NatsOptions(host="0.0.0.0"))
        site = Site(server, _CLUSTER, directory)
        world = GuestSite(segment, server, site, directory)
        try:
            yield world
        finally:
            for machine in world.machines:
                machine.kill()
            site.close()
            server.stop()

"""A host network of a test's own: namespaces that vanish with it, and TAPs driven frame by frame."""

import itertools
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actors.decisions.addresses import lease_of, mac_of
from infra.config.microvm_network import MicrovmNetwork
from infra.network.host import HostNetwork
from infra.network.namespace import entered
from infra.network.policy import Policy
from tests.needed import need_devices, need_packages, need_root
from tests.tap_guest import TapGuest

_numbers = itertools.count(1)


def need_network() -> None:
    """Require what every test of the host network needs."""
    need_root()
    need_packages("ip", "bridge", "nft", "sysctl")
    need_devices("/dev/net/tun")


@contextmanager
def namespace(role: str = "host") -> Iterator[Path]:
    """Lend a network namespace with loopback up."""
    name = f"fleetlog-{role}-{os.getpid()}-{next(_numbers)}"
    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield Path("/run/netns") / name
    finally:
        run("ip", "netns", "del", name)


def run(*command: str, inside: Path | None = None) -> str:
    """Return what a command printed, run in a namespace if one is named."""
    prefix = () if inside is None else ("nsenter", f"--net={inside}")
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


OUTSIDE = "203.0.113.7"
"""A server of the internet."""

ALLOWLISTED, INTERNAL = "10.9.0.5", "10.9.1.5"
METADATA = "169.254.169.254"
EVERYWHERE = (OUTSIDE, ALLOWLISTED, INTERNAL, "192.168.9.9", "172.16.9.9", "100.64.9.9", METADATA)
OPEN_PORT = 7000


class Servers:
    """UDP echoes and TCP listeners in a namespace, one of each per (address, port), until closed."""

    def __init__(self, inside: Path, places: Iterable[tuple[str, int]]) -> None:
        self._sockets: list[socket.socket] = []
        self._poll = select.poll()
        self._echoes: dict[int, socket.socket] = {}
        self._stopping = threading.Event()
        with entered(inside):
            for place in places:
                echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._sockets += [echo, listener]
                echo.bind(place)
                listener.bind(place)
                listener.listen()
                self._echoes[echo.fileno()] = echo
                self._poll.register(echo, select.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End them."""
        self._stopping.set()
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for descriptor, _ in self._poll.poll(20):
                data, sender = self._echoes[descriptor].recvfrom(2048)
                self._echoes[descriptor].sendto(data, sender)


class NetworkSite:
    """A host with a way out to an outside that has addresses of every kind, and guests on its TAPs."""

    def __init__(self, host: Path, outside: Path, stack: ExitStack) -> None:
        self.host, self.outside, self._stack = host, outside, stack
        run(
            "ip",
            "link",
            "add",
            "up0",
            "type",
            "veth",
            "peer",
            "name",
            "up0",
            "netns",
            outside.name,
            inside=host,
        )
        run("ip", "addr", "add", "198.51.100.2/24", "dev", "up0", inside=host)
        run("ip", "addr", "add", "198.51.100.1/24", "dev", "up0", inside=outside)
        for inside in (host, outside):
            run("ip", "link", "set", "up0", "up", inside=inside)
        run("ip", "route", "add", "default", "via", "198.51.100.1", inside=host)
        for address in EVERYWHERE:
            run("ip", "addr", "add", f"{address}/32", "dev", "lo", inside=outside)
        self.serve(outside, *((address, OPEN_PORT) for address in EVERYWHERE))

    def serve(self, inside: Path, *places: tuple[str, int]) -> None:
        """Answer at these addresses and ports until the test ends."""
        self._stack.callback(Servers(inside, places).close)

    def network(self, etc: Path, *, sudo: bool = False, **settings: Any) -> HostNetwork:
        """Return the host's network, not yet provisioned."""
        network = HostNetwork(MicrovmNetwork(**settings), sudo=sudo, namespace=self.host, etc=etc)
        self._stack.callback(network.close)
        return network

    def guest(
        self, network: HostNetwork, number: int, policy: Policy, *, bridge_mac: str | None = None
    ) -> TapGuest:
        """Attach the n-th address of the network and open its TAP as a machine would."""
        lease = lease_of(network.pool("test"), str(network.config.network[number]))
        network.attach(lease, policy, 0, 0)
        mac = bridge_mac or mac_of(network.config.gateway)
        return self._stack.enter_context(TapGuest(lease, self.host, mac))

    def rules(self) -> str:
        """Return every nft rule of the host, as nft prints them."""
        return run("nft", "list", "ruleset", inside=self.host)


@contextmanager
def network_site() -> Iterator[NetworkSite]:
    """Lend a host and its outside."""
    need_network()
    with namespace() as host, namespace("out") as outside, ExitStack() as stack:
        yield NetworkSite(host, outside, stack)

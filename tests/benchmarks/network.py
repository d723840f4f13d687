"""What a machine's network costs: making its TAP and policy, and each packet as machines become many."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from actors.decisions.addresses import Lease, lease_of
from infra.network.host import HostNetwork
from infra.network.policy import Policy, elements
from tests.benchmarks.figures import Figure, middle, paired
from tests.benchmarks.stage import Stage, say
from tests.network_site import NetworkSite, network_site, run
from tests.tap_guest import IP, UDP, TapGuest, datagram, ethernet, packed

MANY = 500
POLICY = Policy(
    allowlist=("10.9.0.0/24", "10.10.0.0/16", "192.0.2.0/28"), host_access=("10.44.0.1:53", "4222")
)
_SINK = "203.0.113.200"
_PACKETS = 4000


def measure(stage: Stage) -> list[Figure]:
    """Measure in a network namespace of our own. Needs root, nft and the TUN device: without, there is nothing to say."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):  # noqa: PTH110 - a device
        say("network: left out, it needs root and /dev/net/tun")
        return []
    with network_site() as site, site.network(stage.directory("etc"), cidr="10.44.0.0/22") as network:
        network.provision()
        run("ip", "route", "add", "blackhole", f"{_SINK}/32", inside=site.outside)
        return [*_making(stage, network), *_packets(stage, site, network)]


def _making(stage: Stage, network: HostNetwork) -> list[Figure]:
    count = stage.scale.processes
    leases = [
        lease_of(network.pool("bench"), str(network.config.network[number]))
        for number in range(900, 900 + count)
    ]

    def each(call: Callable[[Lease], object]) -> list[float]:
        return [_ms(call, lease) for lease in leases]

    steps = {
        "a policy put": each(lambda lease: network.sets.put(lease.address, elements(lease, POLICY))),
        "a new TAP and its policy": each(lambda lease: network.attach(lease, POLICY, 30000, 30000)),
        "a machine's network released, TAP kept": each(network.release),
        "a kept TAP and its policy": each(lambda lease: network.attach(lease, POLICY, 30001, 30001)),
    }
    each(network.release)
    figures = []
    for name, rounds in steps.items():
        value, spread = middle(rounds)
        figures.append(Figure(benchmark="network", name=name, value=value, unit="ms", spread=spread))
    return figures


def _packets(stage: Stage, site: NetworkSite, network: HostNetwork) -> list[Figure]:
    guest = site.guest(network, 2, POLICY)
    leases = [
        lease_of(network.pool("bench"), str(network.config.network[number])) for number in range(3, 2 + MANY)
    ]
    few: list[float] = []
    many: list[float] = []
    for _ in range(stage.scale.rounds):
        few.append(_packet_us(guest))
        for lease in leases:
            network.sets.put(lease.address, elements(lease, POLICY))
        many.append(_packet_us(guest))
        for lease in leases:
            network.sets.drop(lease.address)
    value, spread = middle(many)
    return [
        Figure(
            benchmark="network",
            name=f"a packet through the host, {MANY} policies",
            value=value,
            unit="us",
            baseline=middle(few)[0],
            baseline_name="1 policy",
            paired_ratio=paired(many, few),
            spread=spread,
        )
    ]


def _packet_us(guest: TapGuest) -> float:
    """Return the time of one packet: written to the TAP, it is through bridge, rules and NAT when the call returns."""
    frame = ethernet(guest.gateway_mac, guest.mac, IP) + datagram(UDP, guest.address, packed(_SINK), 5000, 9)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(_PACKETS):
            guest.send(frame)
        times.append((time.perf_counter() - began) / _PACKETS * 1e6)
    return min(times)


def _ms(call: Callable[[Lease], object], lease: Lease) -> float:
    began = time.perf_counter()
    call(lease)
    return (time.perf_counter() - began) * 1000

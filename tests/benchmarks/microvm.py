"""From a noted wish to a started microVM: a whole coordinator beside the same machine made by hand, and what it leaves."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from actors.commands import Demand, RemoveAgent
from actors.decisions.addresses import lease_of
from events.vm import Reaped, Registered, Requested, Spawned, SpawnStarted
from infra.app import Coordinator
from infra.drivers.firecracker.config import SPAWN_WIDTH
from infra.network.namespace import entered
from infra.network.policy import Policy
from tests.benchmarks.figures import Figure, middle, paired
from tests.benchmarks.microvm_images import GUEST, STILL, make_images, scaler_of
from tests.benchmarks.microvm_raw import OVERLAY_MIB, Kit, RawMachine
from tests.benchmarks.microvm_watch import Watch
from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.peer import Images, Peer, Times, running_peers
from tests.benchmarks.stage import Stage, coordinator, fleet, say
from tests.network_site import network_site

MOST_RATIO = 1.25
MOST_BYTES = 1 << 20
BURSTS = (8, 32)
WAIT_S, LOOK_EVERY_S = 120.0, 0.03

_RAW_HOSTS = 200
"""Where in the network the machines made by hand have their addresses."""


def measure(stage: Stage) -> list[Figure]:
    """Measure in a network namespace of our own. Needs root and KVM: without, there is nothing to say."""
    lacks = [device for device in ("/dev/kvm", "/dev/net/tun") if not Path(device).exists()]
    if os.geteuid() != 0 or lacks:
        say(f"microvm: left out, it needs root, /dev/kvm and /dev/net/tun ({', '.join(lacks) or 'not root'})")
        return []
    images = make_images(stage)
    base = stage.root / "j"
    base.mkdir()
    # The peers first: their packages are fetched, and there is no way out of the site.
    with (
        running_peers(stage, images) as peers,
        network_site() as site,
        entered(site.host),
        coordinator(stage.directory("microvm"), fleet(scaler_of(images, base))) as running,
    ):
        bench = _Bench(running, images, base, stage, peers)
        bench.warm_up()
        return [*bench.starts(), *bench.agents(), *bench.memory()]


class _Bench:
    def __init__(
        self, running: Coordinator, images: Images, base: Path, stage: Stage, peers: Sequence[Peer]
    ) -> None:
        self.running, self.scale, self.peers = running, stage.scale, peers
        self.watch = Watch(running)
        self.asked_s = 0.0
        self.spawned = 0
        self._made = 0
        network = running.hosting.network
        if network is None or running.hosting.trouble:
            raise RuntimeError(f"no network to measure in: {running.hosting.trouble}")
        self.kit = Kit(
            base,
            images.binaries,
            images.kernel,
            images.rootfs,
            base / "firecracker" / ".overlay-templates" / f"overlay-{OVERLAY_MIB}mib.ext4",
            network,
            Policy(host_access=("10.44.0.1:53", "*:4222")),
        )

    # One machine, and many.

    def ask(self, labels: tuple[str, ...], count: int) -> list[str]:
        demand = Demand(id=self.running.ids.random(), labels=labels, count=count)
        self.asked_s = time.monotonic()
        found = [answer.vm for answer in self.running.fleet.demand(demand) if answer.vm is not None]
        if len(found) != count:
            raise RuntimeError(f"{count - len(found)} of {count} demands were refused")
        return found

    def ours(self, count: int) -> list[str]:
        """Have machines started by the coordinator, and wait until they run."""
        self.watch.counting = True
        vms = self.ask(STILL, count)
        wait_until(lambda: all(vm in self.watch.running_s for vm in vms), f"{count} machines run")
        self.watch.counting = False
        self.spawned += count
        return vms

    def end(self, vms: Sequence[str]) -> float:
        """Have machines removed; return how long until all were noted as gone, in milliseconds."""
        known = self.running.router.vms
        # Recorded as running first: only then its end is a teardown of a machine, not a spawn called off.
        wait_until(lambda: not any(vm in self.running.world.in_flight for vm in vms), "all spawns are over")
        began_s = time.monotonic()
        for vm in vms:
            self.running.fleet.remove(RemoveAgent(vm=vm, by="bench", force=True))
        wait_until(lambda: not any(vm in known for vm in vms), "all are gone")
        return (max(self.watch.noted_s[Reaped][vm] for vm in vms) - began_s) * 1000

    def raw(self, count: int, width: int = SPAWN_WIDTH) -> tuple[float, float]:
        """Start and end machines by hand, `width` at once; return both in milliseconds."""
        machines = [self._raw_machine(number) for number in range(count)]
        with ThreadPoolExecutor(width) as pool:
            began_s = time.monotonic()
            started_ms = (max(pool.map(RawMachine.start, machines)) - began_s) * 1000
            began_s = time.monotonic()
            list(pool.map(RawMachine.end, machines))
        return started_ms, (time.monotonic() - began_s) * 1000

    def _raw_machine(self, number: int) -> RawMachine:
        self._made += 1
        address = str(self.kit.network.config.network[_RAW_HOSTS + number])
        return RawMachine(self.kit, f"raw-{self._made}", lease_of(self.kit.network.pool("bench"), address))

    def warm_up(self) -> None:
        """Have the overlay template made, and TAPs kept on both sides as on a host that has been at work."""
        self.end(self.ours(max(BURSTS)))
        self.raw(max(BURSTS))
        for peer in self.peers:
            peer.round(max(BURSTS))
        self.watch.destroyed_ms.clear()
        self.watch.executed.clear()
        self.spawned = 0

    # The figures.

    def starts(self) -> list[Figure]:
        """Measure one at a time and bursts; rounds of ours and by hand take turns."""
        figures = self._compare(1, self.scale.processes)
        ended = self.watch.destroyed_ms[: self.scale.processes]
        value, spread = middle(ended)
        by_hand = median(self.raw(1)[1] for _ in range(self.scale.processes))
        figures.append(
            _figure("torn down, one", value, "ms", spread=spread, baseline=by_hand, baseline_name="by hand")
        )
        for count in BURSTS:
            figures += self._compare(count, self.scale.rounds)
        executed = self.watch.executed
        others = sum(times for name, times in executed.items() if name != "jailer")
        say(f"microvm: executed for {self.spawned} machines: {dict(executed)}")
        figures.append(_figure("programs executed per machine", executed["jailer"] / self.spawned, ""))
        figures.append(_figure("of them not the jailer", others / self.spawned, "", value_below=0.001))
        return figures

    def _compare(self, count: int, rounds: int) -> list[Figure]:
        since: dict[type, list[float]] = {Requested: [], SpawnStarted: []}
        by_hand: dict[int, list[float]] = {width: [] for width in {min(count, SPAWN_WIDTH), count}}
        asked: list[Times] = []
        comparison = Comparison(self.peers, count)
        turns = [
            lambda: asked.append(self._our_round(count, since)),
            lambda: self._raw_round(count, by_hand),
            *comparison.turns(),
        ]
        for number in range(rounds):
            # Who comes first changes: the end of one's machines may disturb the start of another's.
            first = number % len(turns)
            for turn in (*turns[first:], *turns[:first]):
                turn()
        # By hand: as many at once as we have, or all at once, whichever is faster.
        width = min(by_hand, key=lambda each: median(by_hand[each]))
        bare = by_hand[width]
        say(f"microvm: {count}: {median(since[Requested]):.1f} ms, by hand {median(bare):.1f} ms")
        figures = []
        for event, words in ((Requested, "vm.requested noted"), (SpawnStarted, "vm.spawn_started noted")):
            value, spread = middle(since[event])
            figures.append(
                _figure(
                    f"{words} to all started, {count} at once",
                    value,
                    "ms",
                    spread=spread,
                    baseline=median(bare),
                    baseline_name=f"by hand, {width} wide" if count > 1 else "by hand",
                    paired_ratio=paired(since[event], bare),
                    ratio_at_most=MOST_RATIO if event is Requested else None,
                )
            )
        return [*figures, *comparison.figures(asked)]

    def _our_round(self, count: int, since: dict[type, list[float]]) -> Times:
        vms = self.ours(count)
        for event, values in since.items():
            values.append(self.watch.ms(event, vms))
        gone_ms = self.end(vms)  # waits until all are noted as running first
        noted_s = self.watch.noted_s[Spawned]
        return Times((max(noted_s[vm] for vm in vms) - self.asked_s) * 1000, gone_ms)

    def _raw_round(self, count: int, by_hand: dict[int, list[float]]) -> None:
        for width, values in by_hand.items():
            values.append(self.raw(count, width)[0])

    def agents(self) -> list[Figure]:
        """Measure until agents are in, their guests emulated or not as this host does."""
        figures = []
        for count in (1, max(BURSTS)):
            found = []
            for _ in range(self.scale.rounds):
                vms = self.ask(GUEST, count)
                registered = self.watch.noted_s[Registered]
                wait_until(lambda r=registered, v=vms: all(vm in r for vm in v), "all agents are in")  # type: ignore[misc]
                found.append(self.watch.ms(Requested, vms, registered))
                self.end(vms)
            value, spread = middle(found)
            name = f"vm.requested noted to all registered, {count} at once"
            figures.append(_figure(name, value, "ms", spread=spread))
        return figures

    def memory(self) -> list[Figure]:
        """Measure what the coordinator's process has in memory with many machines and with none."""
        count = self.scale.live // 10
        gc.collect()
        before = _resident_bytes()
        vms = self.ours(count)
        wait_until(lambda: not self.running.world.in_flight, "all are recorded")
        gc.collect()
        grown = _resident_bytes() - before
        self.end(vms)
        name = f"coordinator's memory per machine, of {count}"
        return [_figure(name, grown / count / 1000, "kB", value_below=MOST_BYTES / 1000)]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something, without taking the interpreter from those who bring it about: when it was is noted by them.

    Raises:
        TimeoutError: it did not come to be.
    """
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {WAIT_S:g} s: {what}")
        time.sleep(LOOK_EVERY_S)


def _figure(name: str, value: float, unit: str, **rest: Any) -> Figure:
    return Figure(benchmark="microvm", name=name, value=value, unit=unit, **rest)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

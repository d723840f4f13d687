"""From a noted wish to a started microVM: a whole coordinator beside the same machine made by hand, and what it leaves."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from actors.commands import Demand, RemoveAgent
from actors.decisions.addresses import lease_of
from actors.driver import Abort, SpawnOrder
from actors.ports import Appended, Decision, Outcome
from events.vm import Handle, Registered, Requested, SpawnStarted
from infra.app import Coordinator
from infra.config.firecracker import FirecrackerLabelSet, FirecrackerScaler
from infra.drivers.firecracker.config import SPAWN_WIDTH
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.network.namespace import entered
from infra.network.policy import Policy
from tests.benchmarks.figures import Figure, middle, paired
from tests.benchmarks.microvm_raw import OVERLAY_MIB, UID, Kit, RawMachine
from tests.benchmarks.stage import SCALER, Stage, coordinator, fleet, say
from tests.guest.binaries import fetch_binaries
from tests.guest.build import build_guest
from tests.guest.halting import write_halting_kernel
from tests.guest.rootfs import make_rootfs
from tests.network_site import network_site

MOST_RATIO = 1.25
MOST_BYTES = 1 << 20
BURSTS = (8, 32)
STILL, GUEST = ("still",), ("guest",)
"""Machines that halt at once, so that the host is measured and not its emulation of guests; and agents."""

WAIT_S, LOOK_EVERY_S = 120.0, 0.03

_RAW_HOSTS = 200
"""Where in the network the machines made by hand have their addresses."""


def measure(stage: Stage) -> list[Figure]:
    """Measure in a network namespace of our own. Needs root and KVM: without, there is nothing to say."""
    lacks = [device for device in ("/dev/kvm", "/dev/net/tun") if not Path(device).exists()]
    if os.geteuid() != 0 or lacks:
        say(f"microvm: left out, it needs root, /dev/kvm and /dev/net/tun ({', '.join(lacks) or 'not root'})")
        return []
    fetch_binaries()
    with network_site() as site, entered(site.host):
        place = _Images(stage)
        with coordinator(stage.directory("microvm"), fleet(place.scaler())) as running:
            bench = _Bench(running, place, stage)
            bench.warm_up()
            return [*bench.starts(), *bench.agents(), *bench.memory()]


class _Images:
    def __init__(self, stage: Stage) -> None:
        self.base = stage.root / "j"
        self.base.mkdir()
        self.binaries = fetch_binaries()
        self.kernel = write_halting_kernel(stage.root / "halt.elf")
        self.rootfs = make_rootfs(stage.root / "rootfs.ext4")

    def scaler(self) -> FirecrackerScaler:
        rest: dict[str, Any] = {"rootfs_path": str(self.rootfs), "overlay_mib": OVERLAY_MIB}
        return FirecrackerScaler(
            name=SCALER,
            backend="firecracker",
            max_agents=250,
            max_concurrent_spawns=250,
            register_timeout_s=3600,
            heartbeat_grace_s=3600,
            stop_grace_s=0,
            firecracker_path=str(self.binaries.firecracker),
            jailer_path=str(self.binaries.jailer),
            kernel_path=str(self.kernel),
            uid=UID,
            gid=UID,
            chroot_base=str(self.base),
            vcpus=1,
            mem_mib=64,
            label_sets=(
                FirecrackerLabelSet(labels=STILL, **rest),
                FirecrackerLabelSet(
                    labels=GUEST, kernel_path=str(build_guest()), env={"GUEST_TEST": "wait"}, **rest
                ),
            ),
        )


class _Watch:
    """When what happened to each machine, by the monotonic clock, and which programs were executed meanwhile."""

    def __init__(self, running: Coordinator) -> None:
        self.noted_s: dict[type, dict[str, float]] = {Requested: {}, SpawnStarted: {}, Registered: {}}
        self.running_s: dict[str, float] = {}
        self.destroyed_ms: list[float] = []
        self.executed: Counter[str] = Counter()
        self.counting = False
        self._mine = threading.local()
        self._watch_journal(running)
        (driver,) = running.world.drivers.values()
        assert isinstance(driver, FirecrackerDriver)
        self._watch_driver(driver)
        sys.addaudithook(self._audit)

    def _watch_journal(self, running: Coordinator) -> None:
        append = running.journal.append

        def watched(decision: Decision, done: Callable[[Outcome], None]) -> None:
            def acknowledged(outcome: Outcome) -> None:
                now = time.monotonic()
                if isinstance(outcome, Appended):
                    for fact in outcome.facts:
                        if type(fact.event) in self.noted_s:
                            self.noted_s[type(fact.event)][fact.aggregate.removeprefix("vm.")] = now
                done(outcome)

            append(decision, acknowledged)

        running.journal.append = watched  # type: ignore[method-assign]

    def _watch_driver(self, driver: FirecrackerDriver) -> None:
        spawn, destroy = driver.spawn, driver.destroy

        def spawned(order: SpawnOrder, abort: Abort) -> Handle:
            self._mine.vm = order.vm
            return spawn(order, abort)

        def reached(point: str) -> None:
            if point == "firecracker.spawn.running":
                self.running_s[self._mine.vm] = time.monotonic()

        def destroyed(vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
            began_s = time.monotonic()
            evidence = destroy(vm, placement, handle, abort)
            self.destroyed_ms.append((time.monotonic() - began_s) * 1000)
            return evidence

        driver.spawn, driver.destroy, driver._reach = spawned, destroyed, reached  # type: ignore[method-assign]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.counting and event in {
            "os.posix_spawn",
            "subprocess.Popen",
            "os.fork",
            "os.system",
            "os.exec",
        }:
            self.executed[Path(str(arguments[0] if arguments else event)).name] += 1

    def ms(self, since: type, vms: Sequence[str], until: dict[str, float] | None = None) -> float:
        """Return how long it took from the first of these facts until all machines had come so far."""
        until = self.running_s if until is None else until
        return (max(until[vm] for vm in vms) - min(self.noted_s[since][vm] for vm in vms)) * 1000


class _Bench:
    def __init__(self, running: Coordinator, images: _Images, stage: Stage) -> None:
        self.running, self.scale = running, stage.scale
        self.watch = _Watch(running)
        self.spawned = 0
        self._made = 0
        network = running.hosting.network
        if network is None or running.hosting.trouble:
            raise RuntimeError(f"no network to measure in: {running.hosting.trouble}")
        self.kit = Kit(
            images.base,
            images.binaries,
            images.kernel,
            images.rootfs,
            images.base / "firecracker" / ".overlay-templates" / f"overlay-{OVERLAY_MIB}mib.ext4",
            network,
            Policy(host_access=("10.44.0.1:53", "*:4222")),
        )

    # One machine, and many.

    def ask(self, labels: tuple[str, ...], count: int) -> list[str]:
        demand = Demand(id=self.running.ids.random(), labels=labels, count=count)
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

    def end(self, vms: Sequence[str]) -> None:
        known = self.running.router.vms
        # Recorded as running first: only then its end is a teardown of a machine, not a spawn called off.
        wait_until(lambda: not any(vm in self.running.world.in_flight for vm in vms), "all spawns are over")
        for vm in vms:
            self.running.fleet.remove(RemoveAgent(vm=vm, by="bench", force=True))
        wait_until(lambda: not any(vm in known for vm in vms), "all are gone")

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
        for number in range(rounds):
            # Who comes first changes: the end of one's machines may disturb the start of the other's.
            if number % 2:
                self._our_round(count, since)
            self._raw_round(count, by_hand)
            if not number % 2:
                self._our_round(count, since)
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
        return figures

    def _our_round(self, count: int, since: dict[type, list[float]]) -> None:
        vms = self.ours(count)
        for event, values in since.items():
            values.append(self.watch.ms(event, vms))
        self.end(vms)

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

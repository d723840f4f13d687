"""What reclaims on this host for one coordinator: its sources, what has been reclaimed so far, and sweeps without a log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from actors.decisions.addresses import Lease
from actors.decisions.reclaim import NETWORK_KINDS, Standing
from actors.driver import Driver, Resource
from actors.errors import DriverError, Refused
from actors.host import BootLedger
from actors.reclaiming import Leftover, Reclaiming
from actors.sweep import Outcome, Report, Sweeper, say
from actors.world import World
from infra.config.bare_metal import BareMetalScaler
from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.drivers.bare_metal import hierarchy
from infra.drivers.bare_metal.driver import BareMetalDriver
from infra.drivers.bare_metal.leftovers import ProcessLeftovers
from infra.drivers.catalogue import bare_metal_config, firecracker_config
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.leftovers import FirecrackerLeftovers
from infra.network.host import HostNetwork
from infra.network.leftovers import NetworkLeftovers
from infra.network.policy import Policy
from infra.owner_lock import OwnerLock
from projections.boot import FleetState

logger = logging.getLogger("fleetlog.reclaim")


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What sweeps came to since the start, by kind; `spared`, `failing` and `unlistable` as of the last one."""

    found: Mapping[str, int] = {}
    reaped: Mapping[str, int] = {}
    failed: Mapping[str, int] = {}
    spared: Mapping[str, int] = {}
    sweeps: int = 0
    unlisted: int = 0
    failing: int = 0
    unlistable: int = 0


class HostCare:
    """The sources of leftovers of a fleet file on this host. `network` None: only what machines left.

    `drivers` are the coordinator's own; without them, ones that start nothing are made for the file's scalers.

    A coordinator keeps its locks from the first listing on until `close`, so that no other process of its name takes
    a machine that just comes up for a dead one.
    """

    def __init__(
        self,
        config: FleetConfig,
        owner: str,
        state: Path,
        *,
        drivers: Iterable[Driver] | None = None,
        network: HostNetwork | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._locks: dict[Path, OwnerLock] = {}
        self._own: list[Driver] = []
        self._owner = owner
        sources: list[Reclaiming] = []
        for driver in self._made(config, state) if drivers is None else drivers:
            match driver:
                case FirecrackerDriver() if Path(driver.config.chroot_base) not in self._locks:
                    base = Path(driver.config.chroot_base)
                    sources.append(self._locked(base, FirecrackerLeftovers(driver)))
                case BareMetalDriver() if state not in self._locks:
                    sources.append(
                        self._locked(state, ProcessLeftovers(driver.config, hierarchy.find, reach))
                    )
                case FirecrackerDriver() | BareMetalDriver():
                    pass  # scalers that share a folder find the same there
                case _:
                    sources.append(SurveyOnly(driver))
        if network is not None:
            sources.append(NetworkLeftovers(network, owner))
        self.sweeper = Sweeper(owner, sources, reach)
        self.tally = Tally()
        self.unaccounted: tuple[Resource, ...] = ()
        self.strangers: frozenset[str] = frozenset()

    def _made(self, config: FleetConfig, state: Path) -> list[Driver]:
        """Return drivers that start nothing, for a time without a coordinator."""
        for scaler in config.scalers:
            match scaler:
                case FirecrackerScaler():
                    settings = firecracker_config(
                        scaler, owner=self._owner, state=state, environment={}, host_access=()
                    )
                    self._own.append(FirecrackerDriver(settings, _NoNetwork()))
                case BareMetalScaler():
                    metal = bare_metal_config(scaler, owner=self._owner, state=state, environment={})
                    self._own.append(BareMetalDriver(metal, ambient={}))
                case _:
                    pass
        return self._own

    def _locked(self, folder: Path, source: Reclaiming) -> Reclaiming:
        self._locks[folder] = OwnerLock(folder, self._owner)
        return Locked(source, self._locks[folder])

    def done(self, report: Report) -> None:
        """Count a sweep, and remember what it spared."""
        before = self.tally
        self.tally = Tally(
            found=_sum(before.found, *(report.counts(each) for each in _ORPHANS)),
            reaped=_sum(before.reaped, report.counts("reaped")),
            failed=_sum(before.failed, report.counts("failed")),
            spared=report.counts("spared"),
            sweeps=before.sweeps + 1,
            unlisted=before.unlisted + len(report.unlisted),
            failing=sum(report.counts("failed").values()),
            unlistable=len(report.unlisted),
        )
        left = [each for each in report.findings if each.outcome != "reaped"]
        self.unaccounted = tuple(_resource(each.leftover, each.why) for each in left)
        self.strangers = frozenset(
            each.leftover.address for each in left if each.leftover.kind in NETWORK_KINDS
        )

    def at_boot(self, world: World, fleet: FleetState) -> None:
        """Sweep before any actor lives. A failure is said, and keeps nobody from starting."""
        leased = {address for state in fleet.allocators.values() for address in state.leases}
        leased |= {vm.address for vm in fleet.vms.values() if vm.address}
        try:
            report = self.sweeper.sweep(BootLedger(world, fleet.vms, frozenset(leased)))
        except Exception:
            logger.exception("the host was not swept before the start; it is tried again later")
            return
        say(report, "at the start")
        self.done(report)

    def close(self) -> None:
        """Let go of the locks, and of what was made for it. Repeatable."""
        for driver in self._own:
            driver.close()
        for lock in self._locks.values():
            lock.close()


_ORPHANS: tuple[Outcome, ...] = ("reaped", "failed", "spared")


class NoLog:
    """What is known without a log and without memory: nothing. So the living are spared, by what the host shows."""

    def standing(self, vm: str) -> Standing:
        """Return that nobody ever heard of it."""
        del vm
        return "absent"

    @contextmanager
    def withholding(self, addresses: frozenset[str]) -> Iterator[frozenset[str] | None]:
        """Give that nothing is held: no coordinator of ours runs that could give an address away."""
        del addresses
        yield frozenset()


class Locked:
    """A source that only the holder of a lock may list: what looks dead to another process may be coming up."""

    def __init__(self, source: Reclaiming, lock: OwnerLock) -> None:
        self._source = source
        self._lock = lock

    def leftovers(self) -> tuple[Leftover, ...]:
        """Take the lock, or keep it, and list."""
        self._lock.hold()
        return self._source.leftovers()

    def reclaim(self, leftover: Leftover) -> str:
        """Pass on."""
        return self._source.reclaim(leftover)

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """Pass on."""
        return self._source.stop(leftover, accounted)


class SurveyOnly:
    """The leftovers of a driver that can list what bears its mark and cannot prove what of it lives: all is spared."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def leftovers(self) -> tuple[Leftover, ...]:
        """List what the driver finds, all of it in doubt."""
        return tuple(
            Leftover(
                kind=each.kind,
                name=each.name,
                vm=each.vm,
                owner=each.owner,
                life="doubt",
                evidence=each.detail or "whether it lives cannot be told",
            )
            for each in self._driver.survey()
        )

    def reclaim(self, leftover: Leftover) -> str:
        """Refuse."""
        raise DriverError("refused", f"{leftover.name} cannot be reclaimed", transient=False)

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """Refuse."""
        del accounted
        raise Refused("unverified", f"{leftover.name} cannot be proven")


class _NoNetwork:
    """In the place of the network of machines that are only taken away: theirs is swept by itself."""

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        """Never asked."""
        del policy, uid, gid
        raise AssertionError(f"nothing is started here, and {lease.address} is given to nobody")

    def release(self, lease: Lease) -> None:
        """Never asked."""
        raise AssertionError(f"{lease.address} may be another's by now")


def sweep_without_log(care: HostCare, why: str, *, dry_run: bool = False) -> Report:
    """Sweep by what the host alone shows, and let go of the locks. For when no coordinator runs."""
    try:
        report = care.sweeper.sweep(NoLog(), dry_run=dry_run)
        if not dry_run:
            say(report, why)
        return report
    finally:
        care.close()


def _sum(*counts: Mapping[str, int]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _resource(leftover: Leftover, why: str) -> Resource:
    return Resource(kind=leftover.kind, name=leftover.name, vm=leftover.vm, owner=leftover.owner, detail=why)

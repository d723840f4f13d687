"""Room for microVMs before a coordinator writes anything: leaked chroots may have filled the disk it starts on."""

import logging
from collections.abc import Callable
from pathlib import Path

from actors.decisions.addresses import Lease
from actors.errors import DriverError
from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.drivers.catalogue import firecracker_config
from infra.drivers.firecracker.disk_guard import free_bytes, guard
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.leftovers import FirecrackerLeftovers
from infra.host import DiskFull
from infra.network.policy import Policy

logger = logging.getLogger("fleetlog.disk")


def make_room(
    config: FleetConfig, *, owner: str, state: Path, measure: Callable[[Path], int] = free_bytes
) -> None:
    """Have a GiB free where the first Firecracker scaler has its chroots, removing those of our dead if need be.

    Goes by the host alone: there is no log yet to ask, and a machine that does not run needs no files.

    Raises:
        DiskFull: too little is free all the same.
    """
    scaler = next((each for each in config.scalers if isinstance(each, FirecrackerScaler)), None)
    if scaler is None:
        return
    found = guard(scaler.chroot_base, lambda: reap_dead(scaler, owner=owner, state=state), measure=measure)
    if not found.recovered:
        raise DiskFull(
            f"{scaler.chroot_base} has {(found.free_bytes or 0) >> 20} MiB free, microVMs need 1024, and "
            f"{found.reaped} leftovers of dead ones were all there was to remove: free some"
        )


def reap_dead(scaler: FirecrackerScaler, *, owner: str, state: Path) -> int:
    """Remove the directories of this owner's machines that provably do not run; return how many."""
    settings = firecracker_config(scaler, owner=owner, state=state, environment={}, host_access=())
    driver = FirecrackerDriver(settings, _Untouched())
    reaped = 0
    try:
        reclaiming = FirecrackerLeftovers(driver)
        for each in reclaiming.leftovers():
            if each.kind != "chroot" or each.owner != owner or each.life != "dead":
                continue
            try:
                reclaiming.reclaim(each)
                reaped += 1
            except DriverError as error:
                logger.warning("%s is left: %s", each.name, error)
    except DriverError as error:
        logger.warning("nothing was removed: %s", error)
    finally:
        driver.close()
    return reaped


class _Untouched:
    """In the place of the network, which only the log can say something of."""

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        """Never asked."""
        del policy, uid, gid
        raise AssertionError(f"nothing is started on {lease.tap} before the log is read")

    def release(self, lease: Lease) -> None:
        """Never asked."""
        raise AssertionError(f"{lease.address} is not given back before the log is read")

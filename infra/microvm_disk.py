"""Room for microVMs before a coordinator writes anything: leaked chroots may have filled the disk it starts on."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.drivers.firecracker.disk_guard import free_bytes, guard
from infra.host import DiskFull
from infra.reclaiming import HostCare, sweep_without_log


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
    found = guard(scaler.chroot_base, lambda: reap_dead(config, owner=owner, state=state), measure=measure)
    if not found.recovered:
        raise DiskFull(
            f"{scaler.chroot_base} has {(found.free_bytes or 0) >> 20} MiB free, microVMs need 1024, and "
            f"{found.reaped} leftovers of dead ones were all there was to remove: free some"
        )


def reap_dead(config: FleetConfig, *, owner: str, state: Path) -> int:
    """Remove what this owner's dead microVMs left; return how many things that were.

    None while another process of this name runs: what looks dead to us may be coming up there.
    """
    microvms = tuple(each for each in config.scalers if isinstance(each, FirecrackerScaler))
    care = HostCare(msgspec.structs.replace(config, scalers=microvms), owner, state)
    return sum(sweep_without_log(care, "the disk is full").counts("reaped").values())

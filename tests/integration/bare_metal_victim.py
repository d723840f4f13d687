"""A coordinator's driver that dies by SIGKILL at a named step; run as a process of its own.

Arguments: the driver's config as JSON, the id, the point to die at.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from actors.driver import SpawnOrder
from events.envelope import Resources
from infra.drivers.bare_metal import BareMetalConfig, BareMetalDriver


def main(config: BareMetalConfig, vm: str, point: str) -> None:
    """Spawn a machine and die at `point`, at the latest after its teardown."""

    def reach(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    driver = BareMetalDriver(config, reach=reach)
    labels = config.label_sets[0].labels
    placement = driver.plan(vm, "pool", labels)
    sys.stdout.buffer.write(msgspec.json.encode(placement) + b"\n")
    sys.stdout.flush()
    order = SpawnOrder(
        vm=vm, scaler="pool", labels=labels, placement=placement, environment={}, limits=Resources()
    )
    handle = driver.spawn(order, threading.Event())
    sys.stdout.buffer.write(msgspec.json.encode(handle) + b"\n")
    sys.stdout.flush()
    reach("spawned")
    driver.destroy(vm, placement, handle, threading.Event())
    reach("destroyed")
    raise SystemExit(f"there is no step {point}")


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=BareMetalConfig), sys.argv[2], sys.argv[3])

"""A coordinator's driver in a process of its own, to be killed at a named step. Says its handle when the machine runs."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from actors.driver import SpawnOrder
from events.envelope import Resources
from infra.drivers.firecracker.config import FirecrackerConfig
from infra.drivers.firecracker.driver import FirecrackerDriver
from tests.guest.segment import Segment
from tests.integration.firecracker_site import LABELS, SegmentNet


def main() -> None:
    told = json.loads(sys.stdin.readline())
    segment = Segment()
    segment.name, segment.path = told["segment"], Path("/run/netns") / told["segment"]

    def reach(point: str) -> None:
        if point == told["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    driver = FirecrackerDriver(
        msgspec.convert(told["config"], FirecrackerConfig), SegmentNet(segment), reach=reach
    )
    order = SpawnOrder(
        vm=told["vm"],
        scaler="pool",
        labels=LABELS,
        placement=told["placement"],
        environment={},
        limits=Resources(),
    )
    handle = driver.spawn(order, threading.Event())
    sys.stdout.write(msgspec.json.encode(handle).decode() + "\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()

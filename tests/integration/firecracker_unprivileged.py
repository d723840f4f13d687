"""A driver that is not root: one machine up, found, and down again, told on stdout step by step."""

import json
import sys
import threading

import msgspec

from actors.driver import SpawnOrder
from events.envelope import Resources
from infra.drivers.firecracker.config import FirecrackerConfig
from infra.drivers.firecracker.driver import FirecrackerDriver
from tests.integration.firecracker_site import LABELS


class Prepared:
    """A network that is there already."""

    def attach(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...


def main() -> None:
    told = json.loads(sys.stdin.readline())
    config, placement, vm = msgspec.convert(told["config"], FirecrackerConfig), told["placement"], told["vm"]
    driver = FirecrackerDriver(config, Prepared())
    order = SpawnOrder(
        vm=vm, scaler="pool", labels=LABELS, placement=placement, environment={}, limits=Resources()
    )
    handle = driver.spawn(order, threading.Event())
    driver.close()
    successor = FirecrackerDriver(config, Prepared())
    found = [successor.inspect(vm, placement, known).presence for known in (handle, None)]
    evidence = successor.destroy(vm, placement, None, threading.Event())
    sys.stdout.write(json.dumps({"found": found, "evidence": evidence, "uid": handle.data["pid"] > 0}) + "\n")


if __name__ == "__main__":
    main()

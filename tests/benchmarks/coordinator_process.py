"""One coordinator started in a process of its own: how long each part took, and how much memory it has; as JSON.

Its scaler's machines all run, as far as its driver says: the driver's own share of a boot is not measured here.
"""

from __future__ import annotations

import time

BEGAN_S = time.perf_counter()

# ruff: noqa: E402 - the clock starts before the imports it measures
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from actors.driver import Exit, Found
from actors.supervisor import Supervisor
from events.vm import Handle
from infra import app
from infra.app import Coordinator
from infra.drivers.scripted import ScriptedDriver
from infra.servers import Servers
from tests.benchmarks.stage import COORDINATOR, coordinator, fleet, scripted_scaler, wait_until


class Report(msgspec.Struct, kw_only=True):
    """Seconds, and kilobytes of resident memory."""

    imports_s: float = 0.0
    servers_s: float = 0.0
    state_s: float = 0.0  # the live fleet from tables and tail, or from the log
    actors_s: float = 0.0  # hosts asked and actors started
    start_s: float = 0.0  # all of it, from the data directory to open doors
    taken_up_s: float = 0.0  # from the same beginning until every machine is watched again
    replayed: int = 0
    source: str = ""
    live: int = 0
    resident_bytes: int = 0


class EverythingRuns(ScriptedDriver):
    """Says of every machine that it runs, and keeps who wants to be told of its end, as a driver must."""

    watches: dict[str, Callable[[Exit], None]]

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Say that it runs."""
        del vm, placement
        return Found(presence="running", evidence="pid 4242 since 123456789", handle=handle)

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Keep `ended`; nothing ends here."""
        del placement, handle
        self.watches[vm] = ended


def main() -> None:
    """Start on the data directory, print the report, stop in good order."""
    directory, tables = Path(sys.argv[1]), sys.argv[2] == "tables"
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR)
    report = Report(imports_s=time.perf_counter() - BEGAN_S)
    driver = EverythingRuns(owner=COORDINATOR, backend="scripted")
    driver.watches = {}
    _measured(report, driver)
    began = time.perf_counter()
    with coordinator(directory, fleet(scripted_scaler(100_000)), tables=tables) as running:
        report.start_s = time.perf_counter() - began
        report.live = len(running.world.router.vms)
        wait_until(lambda: len(driver.watches) == report.live, "every machine is watched again")
        report.taken_up_s = time.perf_counter() - began
        _rest(running)
        report.resident_bytes = _resident_bytes()
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def _measured(report: Report, driver: ScriptedDriver) -> None:
    """Put stopwatches around the parts of a start, and our driver in the place of the configured one."""
    boot, start, supervise = vars(app)["boot"], Servers.start, Supervisor.boot

    def timed_boot(*arguments: Any) -> Any:
        began = time.perf_counter()
        booted = boot(*arguments)
        report.state_s = time.perf_counter() - began
        report.replayed, report.source = booted.replayed, booted.source
        return booted

    def timed_start(servers: Servers) -> None:
        began = time.perf_counter()
        start(servers)
        report.servers_s = time.perf_counter() - began

    def timed_supervise(*arguments: Any) -> Any:
        began = time.perf_counter()
        unaccounted = supervise(*arguments)
        report.actors_s = time.perf_counter() - began
        return unaccounted

    vars(app).update(boot=timed_boot, build_driver=lambda *_, **__: driver)
    patch.object(Servers, "start", timed_start).start()
    patch.object(Supervisor, "boot", timed_supervise).start()


def _rest(running: Coordinator) -> None:
    """Let tables and memory come to rest."""
    end = running.journal.headroom().last_sequence
    wait_until(lambda: all(each.status().sequence >= end for each in running.projectors), "tables caught up")
    gc.collect()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

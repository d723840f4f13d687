"""When what happened to each machine of a coordinator, and which programs were executed meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.driver import Abort, SpawnOrder
from actors.ports import Appended, Decision, Outcome
from events.vm import Handle, Reaped, Registered, Requested, Spawned, SpawnStarted
from infra.app import Coordinator
from infra.drivers.firecracker.driver import FirecrackerDriver

NOTED = (Requested, SpawnStarted, Spawned, Registered, Reaped)


class Watch:
    """Notes times by the monotonic clock, from within the coordinator's journal and driver."""

    def __init__(self, running: Coordinator) -> None:
        self.noted_s: dict[type, dict[str, float]] = {fact: {} for fact in NOTED}
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

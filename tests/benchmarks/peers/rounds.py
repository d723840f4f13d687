"""Rounds of a peer's machines, in a process of its own: a count is asked for on stdin, times are answered as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol


class Machines(Protocol):
    """What a peer can do."""

    def start(self, vm: str) -> None:
        """Make a machine and start it; return when the peer says that it runs."""

    def remove(self, vm: str) -> None:
        """End a machine in the quickest way there is; return when the peer says that nothing is left."""

    def close(self) -> None:
        """Take away what the peer keeps between machines."""


def serve(prepare: Callable[[dict[str, Any]], Machines]) -> None:
    """Prepare with the settings of the command line, say so, and measure a round for each line until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a peer prints is no answer

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    machines = prepare(json.loads(sys.argv[1]))
    try:
        answer({"ready": True})
        for number, line in enumerate(sys.stdin):
            answer(_round(machines, [f"peer-{number}-{each}" for each in range(int(line))]))
    finally:
        machines.close()


def _round(machines: Machines, vms: Sequence[str]) -> dict[str, Any]:
    try:
        started_ms = _at_once_ms(machines.start, vms)
        return {"started_ms": started_ms, "gone_ms": _at_once_ms(machines.remove, vms)}
    except Exception as error:  # noqa: BLE001 - of code that is not ours: told, and the next round is tried
        with ThreadPoolExecutor(len(vms)) as pool:
            for removed in [pool.submit(machines.remove, vm) for vm in vms]:
                removed.exception()  # some were never made
        return {"error": f"{type(error).__name__}: {error}"}


def _at_once_ms(step: Callable[[str], None], vms: Sequence[str]) -> float:
    with ThreadPoolExecutor(len(vms)) as pool:
        began_s = time.perf_counter()
        list(pool.map(step, vms))
        return (time.perf_counter() - began_s) * 1000

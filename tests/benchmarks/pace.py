"""Calls at a steady rate, begun on time however long the earlier ones take."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
THREADS = 16


def paced(rate: int, count: int, call: Callable[[], T]) -> list[tuple[T, float]]:
    """Return each call's result with the monotonic second at which it was due, which is where its wait began."""

    def on_time(due_s: float) -> tuple[T, float]:
        time.sleep(max(due_s - time.monotonic(), 0))
        return call(), due_s

    with ThreadPoolExecutor(THREADS) as threads:
        begin_s = time.monotonic() + 0.1
        return list(threads.map(on_time, [begin_s + number / rate for number in range(count)]))

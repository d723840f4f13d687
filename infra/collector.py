"""How often Python looks for reference cycles: seldom, in a process with many long-lived objects that has few of them."""

import gc

YOUNG = 10_000
MIDDLE = 20
OLD = 20
"""Python's own 700, 10, 10 would look through the young objects every few facts; that was a quarter of the CPU time of
an append with 4,000 actors. What is never in a cycle is freed at once as ever."""


def collect_seldom() -> None:
    """Set the thresholds of this process. Repeatable."""
    gc.set_threshold(YOUNG, MIDDLE, OLD)

"""The room that is kept in the log for ending lives, when new demand is refused already."""

TEARDOWN_BYTES = 16 * 1024
"""For each live machine: draining or failed, some failed teardowns, reaped and a scale-down per target, each
about 1 KiB with its headers."""


def demand_limit(limit_bytes: int, live_machines: int) -> int:
    """Return the bytes above which only teardown facts are taken: a tenth of the log, or what every live machine needs."""
    return max(0, limit_bytes - max(limit_bytes // 10, live_machines * TEARDOWN_BYTES))

"""How many lines an agent may bring through: a bucket that refills, and a count of what was left out."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What passes in the long run, and at once after a silence."""

    lines_per_s: float = 1000.0
    lines_at_once: float = 4000.0
    bytes_per_s: float = 512 * 1024.0
    bytes_at_once: float = 2 * 1024 * 1024.0


class _Bucket:
    __slots__ = ("at_s", "dropped", "lines", "size")

    def __init__(self, at_s: float, rate: Rate) -> None:
        self.at_s = at_s
        self.lines = rate.lines_at_once
        self.size = rate.bytes_at_once
        self.dropped = 0


class Allowance:
    """One bucket per agent, at most `agents_max` of them (the one longest unused is forgotten, which is kind to it)."""

    def __init__(
        self, monotonic_s: Callable[[], float], rate: Rate | None = None, *, agents_max: int = 20_000
    ) -> None:
        self._monotonic_s = monotonic_s
        self._rate = rate or Rate()
        self._agents_max = agents_max
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._mutex = threading.Lock()

    def admit(self, agent: str, lines: tuple[str, ...], dropped: int) -> tuple[tuple[str, ...], int]:
        """Return the lines that pass, and how many were lost before them: `dropped` by the agent, others here.

        Lines are taken from the front until one does not fit; the lost ones are told with the next that pass.
        """
        with self._mutex:
            bucket = self._bucket(agent)
            passed = 0
            for line in lines:
                size = len(line) + 1
                if bucket.lines < 1 or bucket.size < size:
                    break
                bucket.lines -= 1
                bucket.size -= size
                passed += 1
            lost = bucket.dropped + dropped
            if passed == 0:
                bucket.dropped = lost + len(lines)
                return (), 0
            bucket.dropped = len(lines) - passed
            return lines[:passed], lost

    def _bucket(self, agent: str) -> _Bucket:
        now_s = self._monotonic_s()
        bucket = self._buckets.get(agent)
        if bucket is None:
            bucket = self._buckets[agent] = _Bucket(now_s, self._rate)
            if len(self._buckets) > self._agents_max:
                self._buckets.popitem(last=False)
            return bucket
        self._buckets.move_to_end(agent)
        passed_s = max(0.0, now_s - bucket.at_s)
        bucket.at_s = now_s
        rate = self._rate
        bucket.lines = min(rate.lines_at_once, bucket.lines + passed_s * rate.lines_per_s)
        bucket.size = min(rate.bytes_at_once, bucket.size + passed_s * rate.bytes_per_s)
        return bucket

"""How much of the log is left, for all that append to it: measured now and then, counted on in between."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from actors.errors import LogUnavailable
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.exchange import Exchange
from infra.journal.headroom import demand_limit
from infra.journal.messages import Entry
from infra.journal.stream import LogRefused, StreamState, stream_state
from infra.journal.wire import WireLost

_MEASURED_EVERY_S = 1.0


class Room:
    """Says which decisions of new demand may be written: the rest of the log is kept for ending lives. Thread safe.

    What is on its way counts as stored until it is known not to be, so that two lanes cannot both use the last
    bytes. Nobody waits for another's look at the server; before the first one everybody looks.
    """

    def __init__(self, cluster: str, live_machines: Callable[[], int]) -> None:
        self._cluster = cluster
        self._live_machines = live_machines
        self._lock = threading.Lock()
        self._measured: StreamState | None = None
        self._measured_at = 0.0
        self._stored_by_then_bytes = 0
        self._stored_bytes = 0  # by us, ever
        self._on_its_way_bytes = 0
        self._looking = False
        self._resets = 0

    def measure_again(self) -> None:
        """Look how full the log is before the next append."""
        with self._lock:
            self._measured = None
            self._resets += 1

    def take(self, group: Sequence[Entry], exchange: Exchange) -> tuple[list[Entry], str]:
        """Return those that may be written, in order, and what to tell the others. `settle` the first once through."""
        self._measure(exchange)
        with self._lock:
            state = self._measured
            if state is None or all(entry.decision.teardown for entry in group):
                self._on_its_way_bytes += sum(entry.stored_bytes for entry in group)
                return list(group), ""
            limit = demand_limit(state.limit_bytes, self._live_machines())
            since = self._stored_bytes - self._stored_by_then_bytes
            used = state.used_bytes + since + self._on_its_way_bytes
            taken = []
            for entry in group:
                used += entry.stored_bytes
                if entry.decision.teardown or used <= limit:
                    taken.append(entry)
                    self._on_its_way_bytes += entry.stored_bytes
        return taken, (
            f"the log has {state.used_bytes} of {state.limit_bytes} bytes and the rest is kept for ending lives; "
            "raise its limit with `fleetlog log resize`"
        )

    def settle(self, taken: Iterable[Entry], stored: Iterable[Entry]) -> None:
        """Take note that entries taken are through, and which of them were stored."""
        with self._lock:
            self._on_its_way_bytes -= sum(entry.stored_bytes for entry in taken)
            self._stored_bytes += sum(entry.stored_bytes for entry in stored)

    def _measure(self, exchange: Exchange) -> None:
        """Learn how full the log is, unless that is known to a second or being asked."""
        with self._lock:
            fresh = time.monotonic() - self._measured_at < _MEASURED_EVERY_S
            if self._measured is not None and (fresh or self._looking):
                return
            self._looking = True
            before_bytes, resets = self._stored_bytes, self._resets
        state = None
        try:
            state = stream_state(exchange.wire(), self._cluster, exchange.ack_timeout_s)
        except (WireLost, LogUnavailable, ConnectionRefusedByServer, LogRefused):
            exchange.drop()  # the append itself says what is wrong
        with self._lock:
            self._looking = False
            self._measured_at = time.monotonic()
            if state is not None and resets == self._resets:
                self._measured, self._stored_by_then_bytes = state, before_bytes

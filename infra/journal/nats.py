"""The log on a JetStream stream: the journal port, put together."""

import threading
from collections.abc import Callable, Iterator
from datetime import datetime

from actors.ports import Decision, Headroom, Outcome
from events.envelope import Recorded
from infra.journal.address import NatsAddress
from infra.journal.following import Follow
from infra.journal.headroom import demand_limit
from infra.journal.lanes import Lanes
from infra.journal.reading import Reader, Wires
from infra.journal.stream import DEFAULT_LIMIT_BYTES, StreamState, durable_consumers, open_stream, resize
from infra.journal.wire import Wire


class NatsJournal:
    """See `actors.ports.Journal`. Blocking sockets and two kinds of threads: two that append, one for each follow.

    `limit_bytes` and `replicas` count when the stream is made; later `resize` does. An append is tried for
    `deadline_s`, an acknowledgement waited for `ack_timeout_s`, a read for `read_timeout_s` since its last progress.
    `live_machines` tells for how many teardowns room is kept.

    Raises:
        LogUnavailable, ConnectionRefusedByServer: see `Wire`.
        LogRefused: the stream has foreign settings or cannot be made.
        BrokenLog: the stream has lost facts.
    """

    def __init__(
        self,
        address: NatsAddress,
        cluster: str,
        *,
        name: str = "fleetlog",
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        replicas: int = 1,
        deadline_s: float = 10.0,
        ack_timeout_s: float = 3.0,
        read_timeout_s: float = 5.0,
        live_machines: Callable[[], int] = lambda: 0,
    ) -> None:
        self.address = address
        self.cluster = cluster
        self._name = name
        self._deadline_s = deadline_s
        self._read_timeout_s = read_timeout_s
        self._live_machines = live_machines
        self._follows: list[Follow] = []
        self._lock = threading.Lock()
        self._wires = Wires(self._connect, read_timeout_s)
        self._reader = Reader(self._wires, cluster)
        with self._wires.one() as wire:
            self.opened: StreamState = open_stream(
                wire, cluster, limit_bytes=limit_bytes, replicas=replicas, timeout_s=read_timeout_s
            )
        self._lanes = Lanes(
            self._connect,
            cluster,
            ack_timeout_s=ack_timeout_s,
            deadline_s=deadline_s,
            live_machines=live_machines,
        )

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Queue a decision; see the port."""
        self._lanes.append(decision, done)

    def read(self, aggregate: str, after_version: int = 0) -> tuple[Recorded, ...]:
        """Return the aggregate's facts; see the port."""
        return self._reader.read(aggregate, after_version)

    def replay(
        self, after: int = 0, until: int | None = None, aggregates: str | None = None
    ) -> Iterator[Recorded]:
        """Yield facts at full speed; see the port."""
        return self._reader.replay(after, until, aggregates)

    def sequence_at(self, time: datetime) -> int:
        """Return the sequence of the last fact stored at or before `time`; see the port."""
        return self._reader.sequence_at(time)

    def follow(self, after: int, deliver: Callable[[Recorded], None]) -> Follow:
        """Call `deliver` with every fact after `after`; see the port."""
        follow = Follow(
            self._connect, self.cluster, after=after, deliver=deliver, timeout_s=self._read_timeout_s
        )
        with self._lock:
            self._follows = [one for one in self._follows if one.running] + [follow]
        return follow

    def headroom(self) -> Headroom:
        """Return how full the log is; see the port."""
        return self._headroom(self._reader.state())

    def resize(self, limit_bytes: int) -> Headroom:
        """Set another limit, at once in force for every coordinator.

        Raises:
            LogRefused: what is stored would not fit, or the server has no room for it.
            LogUnavailable: no answer.
        """
        with self._wires.one() as wire:
            state = resize(wire, self.cluster, limit_bytes, self._read_timeout_s)
        self._lanes.measure_again()
        return self._headroom(state)

    def redeliveries(self) -> dict[str, int]:
        """Return how many messages each durable consumer was delivered again; our own follows are none.

        Raises:
            LogUnavailable, LogRefused: no answer, or we may not ask.
        """
        with self._wires.one() as wire:
            return durable_consumers(wire, self.cluster, self._read_timeout_s)

    def close(self) -> None:
        """Wait for queued appends within the deadline, end follows and reads. Repeatable."""
        self._lanes.close(self._deadline_s)
        with self._lock:
            follows, self._follows = self._follows, []
        for follow in follows:
            follow.stop()
        self._wires.close()

    def _headroom(self, state: StreamState) -> Headroom:
        return Headroom(
            used_bytes=state.used_bytes,
            limit_bytes=state.limit_bytes,
            demand_limit_bytes=demand_limit(state.limit_bytes, self._live_machines()),
            facts=state.facts,
            last_sequence=state.last_sequence,
        )

    def _connect(self, timeout_s: float) -> Wire:
        return Wire(self.address, name=self._name, timeout_s=timeout_s)

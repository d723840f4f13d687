"""Two appenders side by side, so that a machine's next step does not wait behind somebody's admission."""

import time
from collections.abc import Callable

from actors.ports import Decision, Outcome
from infra.journal.appender import Appender
from infra.journal.exchange import Connect
from infra.journal.room import Room


class Lanes:
    """See `Journal.append`. Decisions of one fact take one lane, those of several the other.

    A plain publish is through in a fifth of the time of an atomic batch, and most facts travel alone. Lanes overtake
    each other: that is safe, because whoever decides on an aggregate knows its sequence, and a second decision
    that does not know of the first conflicts in whatever order they arrive.
    """

    def __init__(
        self,
        connect: Connect,
        cluster: str,
        *,
        ack_timeout_s: float,
        deadline_s: float,
        live_machines: Callable[[], int],
    ) -> None:
        self._room = Room(cluster, live_machines)

        def lane(name: str) -> Appender:
            return Appender(
                connect,
                cluster,
                ack_timeout_s=ack_timeout_s,
                deadline_s=deadline_s,
                room=self._room,
                name=name,
            )

        self.single = lane("single")
        self.several = lane("several")

    def append(self, decision: Decision, done: Callable[[Outcome], None]) -> None:
        """Queue a decision; see the port."""
        lane = self.single if len(decision.facts) == 1 else self.several
        lane.append(decision, done)

    def measure_again(self) -> None:
        """Look how full the log is before the next append."""
        self._room.measure_again()

    def close(self, timeout_s: float) -> None:
        """Take no more, wait for what is queued within `timeout_s`, then refuse the rest. Repeatable."""
        lanes = (self.single, self.several)
        for lane in lanes:
            lane.take_no_more()
        deadline = time.monotonic() + timeout_s
        for lane in lanes:
            lane.close(max(deadline - time.monotonic(), 0.0))

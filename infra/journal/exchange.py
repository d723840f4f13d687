"""Messages out, acknowledgements back, over one wire that is dropped whenever it is in doubt."""

import time
from collections.abc import Callable, Sequence

from actors.errors import LogUnavailable
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.jetstream import DUPLICATE, NOT_SERVED, ApiError, answer_of
from infra.journal.wire import Frame, Wire, WireLost

Connect = Callable[[float], Wire]
Verdict = int | ApiError
"""The stream sequence at which a write was stored (of its last fact), or why not."""


class Exchange:
    """Keeps a wire open, for one thread; every wait is bounded by `ack_timeout_s`."""

    def __init__(self, connect: Connect, *, ack_timeout_s: float) -> None:
        self.ack_timeout_s = ack_timeout_s
        self._connect = connect
        self._wire: Wire | None = None
        self._sends = 0

    def wire(self) -> Wire:
        """Return the open wire, or open one.

        Raises:
            LogUnavailable, ConnectionRefusedByServer: it cannot be opened.
        """
        if self._wire is None:
            self._wire = self._connect(self.ack_timeout_s)
        return self._wire

    def drop(self) -> None:
        """Close the wire: what was on its way from us dies with it."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def keep_alive(self) -> None:
        """Answer the server's pings of a quiet time."""
        try:
            if self._wire is not None:
                self._wire.receive_many(0.001)
        except (WireLost, ConnectionRefusedByServer):
            self.drop()

    def send(
        self,
        encoders: Sequence[Callable[[str], bytes]],
        answered: Callable[[int, Verdict], None],
        lost: Callable[[], None],
    ) -> None:
        """Send what each encoder makes of its reply subject, and pass each answer on with its place.

        `lost` is called when some went out and not every answer came.

        Raises:
            WireLost, LogUnavailable, ConnectionRefusedByServer: not every answer came; the wire is dropped.
        """
        wire = self.wire()
        self._sends += 1
        replies = [f"{wire.inbox}.{self._sends:x}-{place}" for place in range(len(encoders))]
        places = {reply.encode(): place for place, reply in enumerate(replies)}
        data = b"".join(encode(reply) for encode, reply in zip(encoders, replies, strict=True))
        try:
            wire.send(data, self.ack_timeout_s)
            deadline = time.monotonic() + self.ack_timeout_s
            while places:
                frame = _next(wire, deadline, self.ack_timeout_s)
                place = places.pop(frame.subject, None)
                if place is not None:
                    answered(place, _verdict(frame))
        except (WireLost, LogUnavailable, ConnectionRefusedByServer):
            self.drop()
            lost()
            raise


def _next(wire: Wire, deadline: float, timeout_s: float) -> Frame:
    frame = wire.receive(max(deadline - time.monotonic(), 0.001))
    if frame is None:
        raise WireLost(f"{wire.address}: no acknowledgement within {timeout_s:g} s")
    return frame


def _verdict(frame: Frame) -> Verdict:
    if frame.status == NOT_SERVED:
        return ApiError(NOT_SERVED, "the stream is not served at the moment")
    try:
        answer = answer_of(frame.payload)
    except ApiError as error:
        return error
    if answer.get("duplicate"):
        return ApiError(DUPLICATE, "the server has seen this message id")
    return int(answer["seq"])

"""A short-lived consumer of the log that is asked for facts; nothing is acknowledged, the reader knows where it is."""

import secrets
from collections.abc import Mapping

import msgspec

from infra.journal.jetstream import answer_of
from infra.journal.wire import Frame, Wire, WireLost, publication

_HEARTBEAT = 100
_EXPIRED = 408
_EXPIRES_S = 30
_INACTIVE_S = 60
_PLAIN_TOKENS = 9
"""`$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>...`; with a domain two more come before the stream."""


Arrived = tuple[int, bytes, bytes]
"""Stream sequence, subject and payload of a fact."""


class Pull:
    """Asks for facts after a sequence, on a wire of its own; silence, gaps in service and doubt are `WireLost`.

    `silence_s` is how long the server may say nothing, when asked to say every `heartbeat_s` that it is there.

    Raises:
        ApiError: the consumer cannot be made.
        WireLost, LogUnavailable, ConnectionRefusedByServer: see `Wire.request`.
    """

    def __init__(
        self,
        wire: Wire,
        stream: str,
        *,
        after: int,
        subject: str | None,
        batch: int,
        heartbeat_s: float,
        timeout_s: float,
    ) -> None:
        self._wire = wire
        self._stream = stream
        self._name = f"fleetlog-{secrets.token_hex(6)}"
        self._reply = f"{wire.inbox}.p"
        self._subject = self._reply.encode()
        self._batch = batch
        self._heartbeat_s = heartbeat_s
        self._silence_s = max(2 * heartbeat_s + 0.5, 1.0)
        self._asked = 0
        self._field: int | None = None
        where: dict[str, object] = {"deliver_policy": "by_start_sequence", "opt_start_seq": after + 1}
        if subject is not None:
            where["filter_subject"] = subject
        _create(wire, stream, self._name, where, timeout_s)

    def facts(self) -> list[Arrived]:
        """Return what has come, empty when the server only said that it is there.

        Raises:
            WireLost: silence for too long, or the consumer is gone: make another from where you are.
        """
        if self._asked <= self._batch // 2:
            self._ask()
        frames = self._wire.receive_many(self._silence_s)
        if not frames:
            self._wire.close()
            raise WireLost(f"{self._wire.address}: silent for {self._silence_s:g} s")
        facts = []
        field = self._field
        for frame in frames:
            subject, reply, _, payload = frame
            if subject == self._subject:
                self._status(Frame._make(frame))
                continue
            if field is None:
                field = self._field = _sequence_field(reply)
            facts.append((int(reply.split(b".", field + 1)[field]), subject, payload))
        self._asked -= len(facts)
        return facts

    def end(self) -> None:
        """Remove the consumer; without it the server does after a minute."""
        _delete(self._wire, self._stream, self._name)

    def _ask(self) -> None:
        body = msgspec.json.encode(
            {
                "batch": self._batch,
                "expires": _EXPIRES_S * 10**9,
                "idle_heartbeat": int(self._heartbeat_s * 1e9),
            }
        )
        api = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        self._wire.send(publication(api, self._reply, body), self._silence_s)
        self._asked += self._batch

    def _status(self, frame: Frame) -> None:
        if frame.status == _HEARTBEAT:
            return
        if frame.status == _EXPIRED:
            left = frame.header.partition(b"Nats-Pending-Messages: ")[2].partition(b"\r\n")[0]
            self._asked -= int(left) if left.isdigit() else self._batch
            return
        self._wire.close()
        raise WireLost(
            f"{self._wire.address}: the consumer ended: {frame.header[:80].decode(errors='replace')!r}"
        )


def sequence_before(wire: Wire, stream: str, time: str, timeout_s: float) -> int:
    """Return the sequence before the first fact stored at `time` (RFC 3339) or later; raises as `Pull`."""
    name = f"fleetlog-{secrets.token_hex(6)}"
    where = {"deliver_policy": "by_start_time", "opt_start_time": time}
    sequence = _create(wire, stream, name, where, timeout_s)
    _delete(wire, stream, name)
    return sequence


def _create(wire: Wire, stream: str, name: str, where: Mapping[str, object], timeout_s: float) -> int:
    """Make a consumer and return the sequence it starts after."""
    config: dict[str, object] = {
        "name": name,
        "ack_policy": "none",
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": _INACTIVE_S * 10**9,
        **where,
    }
    api = f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
    if "filter_subject" in where:
        api += f".{where['filter_subject']}"
    body = msgspec.json.encode({"stream_name": stream, "config": config})
    return int(answer_of(wire.request(api, body, timeout_s))["delivered"]["stream_seq"])


def _delete(wire: Wire, stream: str, name: str) -> None:
    wire.send(publication(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", f"{wire.inbox}.gone", b""), 1.0)


def _sequence_field(reply: bytes) -> int:
    return 5 if reply.count(b".") + 1 == _PLAIN_TOKENS else 7

"""How decisions travel: one protocol message for each fact, with the headers that guard it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.ports import Decision, Outcome
from events import subjects
from events.envelope import tag_of
from infra.journal.wire import publication

_MESSAGE_ID = "Nats-Msg-Id"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
_BATCH = "Nats-Batch-Id"
_BATCH_SEQUENCE = "Nats-Batch-Sequence"
_BATCH_COMMIT = "Nats-Batch-Commit"

HEADER_BYTES_MAX = 1024
"""What our headers and the subject take at most; ids and names are bounded."""

STORED_OVERHEAD_BYTES = 400
"""What a fact takes in the stream beside its payload, for estimates between two looks at the server's count."""


@dataclass(slots=True)
class Entry:
    """A decision on its way, its facts encoded, and until when it is tried."""

    decision: Decision
    payloads: tuple[bytes, ...]
    done: Callable[[Outcome], None]
    deadline: float
    in_doubt: bool = False
    """A try was lost on the way: it may have been stored, or may yet be."""
    stored_bytes: int = field(init=False)
    """About what it takes in the stream."""

    def __post_init__(self) -> None:
        self.stored_bytes = sum(map(len, self.payloads)) + STORED_OVERHEAD_BYTES * len(self.payloads)


def single(prefix: str, entry: Entry, reply: str, *, with_id: bool) -> bytes:
    """Return a decision of one fact as a plain guarded publish."""
    assert len(entry.payloads) == 1
    lines = _lines(prefix, entry.decision, 0, with_id=with_id)
    subject = prefix + entry.decision.facts[0].aggregate
    return publication(subject, reply, entry.payloads[0], _block(lines))


def batch(prefix: str, entries: Sequence[Entry], name: str, reply: str, *, with_id: bool) -> bytes:
    """Return whole decisions as one atomic batch, answered once on `reply`."""
    last = sum(len(entry.payloads) for entry in entries)
    place = 0
    chunks = []
    for entry in entries:
        for index, payload in enumerate(entry.payloads):
            place += 1
            lines = [f"{_BATCH}: {name}", f"{_BATCH_SEQUENCE}: {place}"]
            lines += _lines(prefix, entry.decision, index, with_id=with_id)
            if place == last:
                lines.append(f"{_BATCH_COMMIT}: 1")
            subject = prefix + entry.decision.facts[index].aggregate
            chunks.append(publication(subject, reply if place == last else "", payload, _block(lines)))
    return b"".join(chunks)


def _lines(prefix: str, decision: Decision, index: int, *, with_id: bool) -> list[str]:
    fact = decision.facts[index]
    lines = [f"{subjects.TAG_HEADER}: {tag_of(fact.event)}"]
    if with_id:
        lines.append(f"{_MESSAGE_ID}: {fact.aggregate}:{fact.version}:{decision.attempt}")
    if decision.epoch and index == 0:
        lines.append(f"{_EXPECTED}: {decision.epoch}")
        lines.append(f"{_EXPECTED_SUBJECT}: {prefix}{subjects.leader()}")
    elif fact.expected_sequence is not None:
        lines.append(f"{_EXPECTED}: {fact.expected_sequence}")
    return lines


def _block(lines: list[str]) -> bytes:
    return ("NATS/1.0\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode()

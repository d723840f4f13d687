"""What the committer makes of answers that a single server gives rarely or never: a scripted exchange gives them."""

import base64
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from actors.ports import Appended, Conflicted, Decision, NotAppended, Outcome
from events.codec import encode
from infra.journal.commit import Committer
from infra.journal.exchange import Exchange, Verdict
from infra.journal.form import form_of
from infra.journal.jetstream import (
    DUPLICATE,
    DUPLICATE_IN_PROCESS,
    NO_MESSAGE,
    NOT_SERVED,
    STORE_FAILED,
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SEQUENCE_IN_FLIGHT,
    ApiError,
)
from infra.journal.messages import Entry
from infra.journal.wire import WireLost
from tests.contract.journal_rigs import decide, fact, first


class ScriptedWire:
    """Answers reads from what is stored: subject to (sequence, payload)."""

    def __init__(self, stored: dict[int, tuple[str, bytes]]) -> None:
        self.stored = stored

    def request(self, _: str, payload: bytes, __: float) -> bytes:
        """Answer STREAM.MSG.GET."""
        which = msgspec.json.decode(payload)
        for sequence in sorted(self.stored, reverse="last_by_subj" in which):
            subject, body = self.stored[sequence]
            wanted = which.get("last_by_subj") or which.get("next_by_subj") or subject
            at = which.get("seq", 0)
            if subject == wanted and (
                sequence >= at if "next_by_subj" in which else sequence == at or not at
            ):
                data = base64.b64encode(body).decode()
                return msgspec.json.encode({"message": {"subject": subject, "seq": sequence, "data": data}})
        return msgspec.json.encode({"error": {"err_code": NO_MESSAGE, "description": "no message found"}})


class ScriptedExchange(Exchange):
    """Gives the scripted verdicts, one for each send; an exception is a lost connection."""

    def __init__(
        self, *script: Verdict | WireLost, stored: dict[int, tuple[str, bytes]] | None = None
    ) -> None:
        self.ack_timeout_s = 1.0
        self.script = list(script)
        self.sent: list[bytes] = []
        self.scripted = ScriptedWire(stored or {})

    def wire(self) -> ScriptedWire:  # type: ignore[override]
        return self.scripted

    def drop(self) -> None:
        """Nothing to close."""

    def send(
        self,
        encoders: Sequence[Callable[[str], bytes]],
        answered: Callable[[int, Verdict], None],
        lost: Callable[[], None],
    ) -> None:
        for place, encoder in enumerate(encoders):
            self.sent.append(encoder("reply"))
            step = self.script.pop(0)
            if isinstance(step, WireLost):
                lost()
                raise step
            answered(place, step)


def entry(decision: Decision, time_s: float = 5.0) -> Entry:
    payloads = tuple(encode(form_of(decision, one)) for one in decision.facts)
    return Entry(decision, payloads, lambda _: None, time.monotonic() + time_s)


def committed(exchange: Exchange, decision: Decision, time_s: float = 5.0) -> Outcome:
    committer = Committer(exchange, "test", lambda _: None)
    one = entry(decision, time_s)
    return (committer.pipelined if len(decision.facts) == 1 else committer.batch)([one])[0]


SINGLE = first("vm.a")
PAIR = decide(fact("vm.a", 1, 0), fact("vm.b", 1, 0))


@pytest.mark.parametrize("decision", [SINGLE, PAIR])
@pytest.mark.parametrize("code", [WRONG_LAST_SEQUENCE_IN_FLIGHT, WRONG_LAST_SEQUENCE])
def test_a_refusal_though_nobody_moved_means_one_at_a_time_and_is_sent_again(
    decision: Decision, code: int
) -> None:
    exchange = ScriptedExchange(
        ApiError(code, "wrong last sequence"), ApiError(code, "wrong last sequence"), 9
    )
    outcome = committed(exchange, decision)
    assert isinstance(outcome, Appended)
    assert outcome.facts[-1].sequence == 9


@pytest.mark.parametrize("code", [WRONG_LAST_SEQUENCE_IN_FLIGHT, WRONG_LAST_SEQUENCE])
def test_a_refusal_because_another_moved_is_a_conflict_under_either_number(code: int) -> None:
    theirs = encode(form_of(first("vm.a", "theirs"), first("vm.a").facts[0]))
    stored = {4: ("fleetlog.test.log.vm.a", theirs)}
    outcome = committed(ScriptedExchange(ApiError(code, "wrong last sequence"), stored=stored), SINGLE)
    assert isinstance(outcome, Conflicted)
    assert outcome.aggregate == "vm.a"


@pytest.mark.parametrize("code", [NOT_SERVED, DUPLICATE_IN_PROCESS, STORE_FAILED])
@pytest.mark.parametrize("decision", [SINGLE, PAIR])
def test_what_may_pass_is_sent_again_with_the_same_content(decision: Decision, code: int) -> None:
    exchange = ScriptedExchange(ApiError(code, "in a moment"), 9)
    assert isinstance(committed(exchange, decision), Appended)
    ids = [[line for line in sent.split(b"\r\n") if b"Nats-Msg-Id" in line] for sent in exchange.sent]
    assert ids[0] == ids[1] != []


def test_a_duplicate_found_nowhere_is_sent_again_under_the_expected_sequence_alone() -> None:
    exchange = ScriptedExchange(ApiError(DUPLICATE, "seen"), 9)
    assert isinstance(committed(exchange, SINGLE), Appended)
    assert b"Nats-Msg-Id" in exchange.sent[0]
    assert b"Nats-Msg-Id" not in exchange.sent[1]
    assert b"Nats-Expected-Last-Subject-Sequence: 0" in exchange.sent[1]


def test_after_a_lost_answer_a_batch_is_sent_again_whole_and_then_looked_for() -> None:
    payloads = [encode(form_of(PAIR, one)) for one in PAIR.facts]
    stored = {7: ("fleetlog.test.log.vm.a", payloads[0]), 8: ("fleetlog.test.log.vm.b", payloads[1])}
    exchange = ScriptedExchange(
        WireLost("cut"), ApiError(WRONG_LAST_SEQUENCE, "wrong last sequence: 7"), stored=stored
    )
    outcome = committed(exchange, PAIR)
    assert isinstance(outcome, Appended)
    assert [one.sequence for one in outcome.facts] == [7, 8]
    assert len(exchange.sent) == 2


def test_a_lost_answer_and_no_other_until_the_deadline_is_unknown() -> None:
    outcome = committed(ScriptedExchange(*[WireLost("cut")] * 100_000), SINGLE, time_s=0.05)
    assert isinstance(outcome, NotAppended)
    assert (outcome.code, outcome.stored) == ("unavailable", None)


def test_a_server_that_only_asks_to_wait_until_the_deadline_has_stored_nothing() -> None:
    outcome = committed(
        ScriptedExchange(*[ApiError(NOT_SERVED, "not served")] * 100_000), SINGLE, time_s=0.05
    )
    assert isinstance(outcome, NotAppended)
    assert (outcome.code, outcome.stored) == ("unavailable", False)


def test_a_full_disk_is_told_as_full() -> None:
    outcome = committed(ScriptedExchange(ApiError(STORE_FAILED, "no space left on device")), SINGLE)
    assert isinstance(outcome, NotAppended)
    assert (outcome.code, outcome.stored) == ("full", False)

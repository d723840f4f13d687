"""One group of decisions onto the stream: what the server's answers mean, and what becomes of a lost one.

All safety rests on two things and on nothing else: every aggregate's expected sequence travels with the write, and
what is stored after that sequence bears the attempt of whoever wrote it. So a write sent twice, late, or under
another message id never counts twice, and a writer can always find out whether it was the one.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from actors.errors import LogUnavailable
from actors.ports import Appended, NotAppended, Outcome
from events import subjects
from infra.journal import messages
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.exchange import Exchange, Verdict
from infra.journal.form import recorded
from infra.journal.jetstream import (
    DUPLICATE,
    DUPLICATE_IN_PROCESS,
    NO_ROOM,
    NOT_SERVED,
    STORE_FAILED,
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SEQUENCE_IN_FLIGHT,
    ApiError,
    Stored,
    stored,
)
from infra.journal.messages import Entry
from infra.journal.readback import find, moved
from infra.journal.wire import WireLost

_TRANSIENT = frozenset(
    {NOT_SERVED, DUPLICATE_IN_PROCESS, 10008, 10009, 10175, 10176, 10206, 10207, 10210, 10211}
)
"""The server is not ready, or lost track of an unfinished batch: nothing is stored, and it may work in a moment."""
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5


class _NotYet(Exception):  # noqa: N818
    """Nothing was stored, and the same write may be taken in a moment."""


_PASSING = (WireLost, LogUnavailable, ConnectionRefusedByServer, _NotYet)


@dataclass
class _Alone:
    """How far one decision has come that is sent by itself."""

    verdict: ApiError | None
    look_first: bool
    with_id: bool = True


class Committer:
    """Writes groups of decisions and returns their outcomes, whatever server and network do. For one thread.

    `pause` waits between two tries and may return early.
    """

    def __init__(self, exchange: Exchange, cluster: str, pause: Callable[[float], None]) -> None:
        self._exchange = exchange
        self._prefix = subjects.log_prefix(cluster)
        self._stream = subjects.stream(cluster)
        self._pause = pause
        self._nonce = secrets.token_hex(3)
        self._batches = 0

    def pipelined(self, group: Sequence[Entry]) -> list[Outcome]:
        """Write decisions of one fact each, of different aggregates: all sent, then all answers awaited."""
        answers: dict[int, Verdict] = {}
        tries = 0

        def send() -> None:
            nonlocal tries
            tries += 1
            places = [place for place in range(len(group)) if place not in answers]

            def lost() -> None:
                for place in places:
                    if place not in answers:
                        group[place].in_doubt = True

            self._exchange.send(
                [_single_encoder(self._prefix, group[place]) for place in places],
                lambda index, verdict: answers.update({places[index]: verdict}),
                lost,
            )

        failure = self._tried(send, min(entry.deadline for entry in group))
        return [
            self._after_pipeline(entry, answers.get(n), failure, tries > 1) for n, entry in enumerate(group)
        ]

    def batch(self, group: Sequence[Entry]) -> list[Outcome]:
        """Write decisions as one atomic batch; when it is refused, each by itself, so that only the guilty fail."""
        verdicts: list[Verdict] = []
        tries = 0

        def send() -> None:
            nonlocal tries
            tries += 1
            verdict = self._send_batch(group, with_id=True)
            if isinstance(verdict, ApiError) and verdict.code in _TRANSIENT:
                raise _NotYet(str(verdict))
            verdicts.append(verdict)

        failure = self._tried(send, min(entry.deadline for entry in group))
        if not verdicts:
            return [self._unanswered(entry, failure) for entry in group]
        verdict = verdicts[0]
        if isinstance(verdict, int):
            return _appended(group, verdict)
        said = verdict if len(group) == 1 else None
        return [self.alone(entry, said, look_first=tries > 1 or verdict.code == DUPLICATE) for entry in group]

    def alone(self, entry: Entry, verdict: ApiError | None = None, *, look_first: bool = False) -> Outcome:
        """Write one decision by itself until there is an outcome.

        `verdict` is what the server has said to it already. `look_first`: an earlier try may have stored it.
        """
        state = _Alone(verdict, look_first)
        outcome: list[Outcome] = []
        failure = self._tried(lambda: outcome.append(self._settle(entry, state)), entry.deadline)
        return outcome[0] if outcome else self._unanswered(entry, failure)

    def _after_pipeline(
        self,
        entry: Entry,
        verdict: Verdict | None,
        failure: BaseException | None,
        resent: bool,  # noqa: FBT001
    ) -> Outcome:
        if verdict is None:
            return self._unanswered(entry, failure)
        if isinstance(verdict, int):
            return _appended([entry], verdict)[0]
        return self.alone(entry, verdict, look_first=resent)

    def _settle(self, entry: Entry, state: _Alone) -> Outcome:
        if state.look_first:
            if (mine := find(self._look, self._prefix, entry.decision)) is not None:
                return Appended(facts=mine)
            state.look_first = False
        if state.verdict is None:
            state.look_first = True  # in case this try is lost on the way
            verdict = self._send_alone(entry, with_id=state.with_id)
            state.look_first = False
            if isinstance(verdict, int):
                return _appended([entry], verdict)[0]
            state.verdict = verdict
        outcome = self._meaning(entry, state.verdict, state)
        if outcome is not None:
            return outcome
        error, state.verdict = state.verdict, None
        raise _NotYet(str(error))

    def _meaning(self, entry: Entry, error: ApiError, state: _Alone) -> Outcome | None:
        """Tell what a refusal means; None: send it again."""
        match error.code:
            case _ if error.code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_IN_FLIGHT, DUPLICATE):
                if (mine := find(self._look, self._prefix, entry.decision)) is not None:
                    return Appended(facts=mine)
                # A duplicate that is nowhere: the server kept the id of a write that failed after it. From here
                # on the expected sequence guards it alone.
                state.with_id = state.with_id and error.code != DUPLICATE
                # None: nobody moved it, the server only wants one write at a time.
                return moved(self._look, self._prefix, entry.decision)
            case _ if error.code in _TRANSIENT:
                return None
            case _ if error.code in NO_ROOM or (error.code == STORE_FAILED and _about_room(error)):
                detail = f"stream {self._stream} is full: {error}; `fleetlog log resize` raises its limit"
                return NotAppended(code="full", detail=detail, stored=False)
            case _ if error.code == STORE_FAILED:
                return None
            case _:
                detail = f"stream {self._stream} will not take our facts: {error}; see `fleetlog doctor`"
                return NotAppended(code="foreign", detail=detail, stored=False)

    def _look(self, which: dict[str, object]) -> Stored | None:
        try:
            return stored(self._exchange.wire(), self._stream, which, self._exchange.ack_timeout_s)
        except WireLost:
            self._exchange.drop()
            raise
        except ApiError as error:
            raise _NotYet(str(error)) from error

    def _send_alone(self, entry: Entry, *, with_id: bool) -> Verdict:
        if len(entry.payloads) > 1:
            return self._send_batch([entry], with_id=with_id)
        return self._send_for_one_answer(
            [entry], lambda reply: messages.single(self._prefix, entry, reply, with_id=with_id)
        )

    def _send_batch(self, group: Sequence[Entry], *, with_id: bool) -> Verdict:
        self._batches += 1
        # A new name for each send: the server may still hold the beginning of a lost one.
        name = f"{self._nonce}{self._batches:x}"
        return self._send_for_one_answer(
            group, lambda reply: messages.batch(self._prefix, group, name, reply, with_id=with_id)
        )

    def _send_for_one_answer(self, group: Sequence[Entry], encode: Callable[[str], bytes]) -> Verdict:
        verdicts: list[Verdict] = []

        def lost() -> None:
            for entry in group:
                entry.in_doubt = True

        self._exchange.send([encode], lambda _, verdict: verdicts.append(verdict), lost)
        return verdicts[0]

    def _tried(self, attempt: Callable[[], None], deadline: float) -> BaseException | None:
        """Try until it ends or the deadline passes; return the last failure, None when it ended."""

        def spent(_: RetryCallState) -> bool:
            return time.monotonic() >= deadline

        if time.monotonic() >= deadline:
            return TimeoutError("its time was over before it was its turn")
        try:
            attempt()  # nearly always enough, and the machinery for more would be a tenth of such an append
        except _PASSING as error:
            if time.monotonic() >= deadline:
                return error
            self._pause(_FIRST_WAIT_S)
        else:
            return None
        retrying = Retrying(
            retry=retry_if_exception_type(_PASSING),
            wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            stop=spent,
            sleep=self._pause,
            reraise=True,
        )
        try:
            retrying(attempt)
        except _PASSING as error:
            return error
        return None

    def _unanswered(self, entry: Entry, failure: BaseException | None) -> NotAppended:
        return NotAppended(
            code="unavailable",
            detail=f"the log did not take it in time: {failure}; check that NATS runs and that its disk is not full",
            stored=None if entry.in_doubt else False,
        )


def _single_encoder(prefix: str, entry: Entry) -> Callable[[str], bytes]:
    return lambda reply: messages.single(prefix, entry, reply, with_id=True)


def _appended(group: Sequence[Entry], last_sequence: int) -> list[Outcome]:
    sequence = last_sequence - sum(len(entry.payloads) for entry in group)
    outcomes: list[Outcome] = []
    for entry in group:
        facts = []
        for fact in entry.decision.facts:
            sequence += 1
            facts.append(recorded(entry.decision, fact, sequence))
        outcomes.append(Appended(facts=tuple(facts)))
    return outcomes


def _about_room(error: ApiError) -> bool:
    return "maximum" in error.description or "no space" in error.description

"""The one shell around every decision: hydrate, decide, append with the expected version, evolve, act."""

import logging
from abc import abstractmethod
from typing import Any, NamedTuple

from pykka import ActorDeadError, ActorRef

from actors.errors import Conflict, LogFull, LogUnavailable, Refused
from actors.pooled import PooledActor, tell_first
from actors.ports import Appended, Conflicted, Decision, NewFact, NotAppended, Outcome
from actors.world import Call, Observed, World
from events.envelope import Recorded

logger = logging.getLogger(__name__)

DECISIONS_MOST = 5
"""How often one command is decided anew after another writer got there first; then it is a Conflict."""

LOG_RETRY_S = 1.0
"""How long to wait before the log is asked again when it did not answer."""


class Proposal(NamedTuple):
    """What a command comes to: the facts to append, and what the caller gets once they are durable."""

    facts: tuple[NewFact, ...] = ()
    result: Any = None
    teardown: bool = False


class _Settled(NamedTuple):
    call: Call
    proposal: Proposal
    tries: int
    outcome: Outcome


class _Reread(NamedTuple):
    call: Call
    tries: int
    facts: dict[str, tuple[Recorded, ...]] | None  # None: the log did not answer


class _ReadNow(NamedTuple):
    call: Call
    tries: int


class Aggregate(PooledActor):
    """An actor whose state is a fold of the log.

    While an append is out the mailbox is parked: no second command decides on a state that may be old. The
    acknowledgement comes back as a message; only then are the facts applied, others told, and effects begun.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self._out: Call | None = None

    # What a subclass says.

    @abstractmethod
    def resolve(self, call: Call) -> Proposal | None:
        """Decide. None: the subclass keeps the call and answers it later.

        Raises:
            Refused: told to the caller; nothing is written.
        """

    @abstractmethod
    def apply(self, facts: tuple[Recorded, ...]) -> None:
        """Evolve the state by facts that are durable now, and begin what follows from them."""

    @abstractmethod
    def aggregates(self, call: Call) -> tuple[str, ...]:
        """Return the aggregates to read again before `call` is decided anew."""

    @abstractmethod
    def rehydrate(self, read: dict[str, tuple[Recorded, ...]]) -> None:
        """Take the state from the facts just read."""

    def observe(self, fact: Recorded) -> None:
        """Take note of a fact another actor or process appended. None by default."""

    def receive(self, message: Any) -> None:
        """Handle a message that is neither a command nor a fact."""
        raise AssertionError(f"{type(self).__name__} cannot handle {message!r}")

    def dropped(self, call: Call) -> None:
        """Nobody waits for this command, and the log would not take its facts: try again later, by default."""
        ref = self.actor_ref
        self.world.timers.set(
            f"{ref.actor_urn}:retry:{call.command!r}"[:200], LOG_RETRY_S, lambda: _tell_again(ref, call)
        )

    # The shell.

    def on_receive(self, message: Any) -> None:
        """Handle one message to its end, or to the point where the log has to answer."""
        match message:
            case Call():
                self._decide(message, tries=0)
            case Observed(fact=fact):
                self.observe(fact)
            case _Settled():
                self._settle(message)
            case _Reread():
                self._decide_again(message)
            case _ReadNow(call=call, tries=tries):
                self._read_again(call, tries)
            case _:
                self.receive(message)

    def on_failure(self, *_: Any) -> None:
        """Answer the command that was out: whether it counts is in the log."""
        if self._out is not None:
            _answer(
                self._out,
                LogUnavailable("its actor died while the log was asked: look at the log for the outcome"),
            )

    def _decide(self, call: Call, tries: int) -> None:
        try:
            proposal = self.resolve(call)
        except Refused as refused:
            self.unpark()
            _answer(call, refused)
            return
        if proposal is None:
            self.unpark()
            return
        if not proposal.facts:
            self.unpark()
            _answer(call, proposal.result)
            return
        self._append(call, proposal, tries)

    def _append(self, call: Call, proposal: Proposal, tries: int) -> None:
        world, ref = self.world, self.actor_ref
        attempt = world.ids.random()
        cause = call.cause or f"command:{type(call.command).__name__}"
        decision = Decision(
            attempt=attempt,
            at=world.clock.now(),
            writer=world.site.coordinator,
            cause=cause,
            correlation=call.correlation or attempt,
            facts=proposal.facts,
            teardown=proposal.teardown,
        )
        self.park()
        self._out = call
        world.crash.reach(f"{_name(proposal)}:before-append")
        world.journal.append(
            decision, lambda outcome: _tell_first(ref, _Settled(call, proposal, tries, outcome))
        )

    def _settle(self, settled: _Settled) -> None:
        call, proposal, tries, outcome = settled
        match outcome:
            case Appended(facts=facts):
                self.world.crash.reach(f"{_name(proposal)}:after-append")
                self._out = None
                self.apply(facts)
                self.unpark()
                _answer(call, proposal.result)
            case NotAppended(stored=False, code=code, detail=detail):
                self._out = None
                self.unpark()
                if call.reply is None:
                    self.dropped(call)
                else:
                    _answer(call, LogFull(detail) if code == "full" else LogUnavailable(detail))
            case Conflicted() | NotAppended():
                self._read_again(call, tries + 1)

    def _read_again(self, call: Call, tries: int) -> None:
        """Read what was missed; the mailbox stays parked, the thread does not wait."""
        world, ref, wanted = self.world, self.actor_ref, self.aggregates(call)

        def read() -> None:
            try:
                facts = {aggregate: world.journal.read(aggregate) for aggregate in wanted}
            except LogUnavailable as error:
                logger.warning("%s cannot be read yet: %s", ", ".join(wanted), error)
                _tell_first(ref, _Reread(call, tries, None))
            else:
                _tell_first(ref, _Reread(call, tries, facts))

        try:
            world.reads.submit(read)
        except Refused:
            self._decide_again(_Reread(call, tries, None))

    def _decide_again(self, reread: _Reread) -> None:
        call, tries, facts = reread
        if facts is None:
            ref = self.actor_ref
            self.world.timers.set(
                f"{ref.actor_urn}:read", LOG_RETRY_S, lambda: _tell_first(ref, _ReadNow(call, tries))
            )
            return
        self._out = None
        self.rehydrate(facts)
        if tries >= DECISIONS_MOST:
            self.unpark()
            message = f"another writer got there first {tries} times in a row: {', '.join(facts)}; try again"
            if call.reply is None:
                logger.error("%s gives up on %r: %s", self, call.command, message)
                self.dropped(call)
            _answer(call, Conflict(message))
            return
        self._decide(call, tries)


def _name(proposal: Proposal) -> str:
    """Name a crash point by the last fact of a proposal: the one the others are for."""
    return str(proposal.facts[-1].event.__struct_config__.tag)


def _answer(call: Call, result: Any) -> None:
    if call.reply is not None:
        call.reply(result)
    elif isinstance(result, Refused):
        logger.info("%r: %s", call.command, result)


def _tell_first(ref: ActorRef[Any], message: Any) -> None:
    try:
        tell_first(ref, message)
    except ActorDeadError:
        logger.debug("the actor that asked the log has ended: %s", ref)


def _tell_again(ref: ActorRef[Any], call: Call) -> None:
    try:
        ref.tell(call)
    except ActorDeadError:
        logger.debug("the actor that would try again has ended: %s", ref)

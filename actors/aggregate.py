"""The one shell around every decision: hydrate, decide, append with the expected version, evolve, act."""

import logging
from abc import abstractmethod
from typing import Any, NamedTuple

from pykka import ActorDeadError, ActorRef

from actors.errors import Conflict, LogFull, LogUnavailable, Refused
from actors.pooled import PooledActor, tell_first
from actors.ports import Appended, Conflicted, Decision, NewFact, NotAppended, Outcome
from actors.world import Call, Observed, World, tell
from events.claim import ClaimRegistered
from events.envelope import Recorded
from events.scale import Down, Up
from events.vm import SpawnStarted

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


class _Try(NamedTuple):
    """One command's way through the log.

    `attempt` marks the facts it tried to append last; `doubtful` are the earlier attempts of which nobody knows
    whether they were stored, or still will be: a write can arrive after its writer gave it up.
    """

    call: Call
    number: int
    proposal: Proposal = Proposal()
    attempt: str = ""
    doubtful: tuple[tuple[str, Proposal], ...] = ()


class _Settled(NamedTuple):
    tried: _Try
    outcome: Outcome


class _Reread(NamedTuple):
    tried: _Try
    facts: dict[str, tuple[Recorded, ...]] | None  # None: the log did not answer


class _ReadNow(NamedTuple):
    tried: _Try


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

    def first_cause(self) -> str:
        """Return what began the chain its facts belong to, for commands that do not say; empty: each begins its own."""
        return ""

    def observe(self, fact: Recorded) -> None:
        """Take note of a fact another actor or process appended. None by default."""

    def receive(self, message: Any) -> None:
        """Handle a message that is neither a command nor a fact."""
        raise AssertionError(f"{type(self).__name__} cannot handle {message!r}")

    def dropped(self, call: Call) -> None:
        """Nobody waits for this command, and the log would not take its facts: try again later, by default."""
        ref = self.actor_ref
        self.world.timers.set(
            f"{ref.actor_urn}:retry:{call.command!r}"[:200], LOG_RETRY_S, lambda: tell(ref, call)
        )

    # The shell.

    def on_receive(self, message: Any) -> None:
        """Handle one message to its end, or to the point where the log has to answer."""
        match message:
            case Call():
                self._decide(_Try(message, 0))
            case Observed(fact=fact):
                self.observe(fact)
            case _Settled():
                self._settle(message)
            case _Reread():
                self._decide_again(message)
            case _ReadNow(tried=tried):
                self._read_again(tried)
            case _:
                self.receive(message)

    def on_failure(self, *_: Any) -> None:
        """Answer the command that was out: whether it counts is in the log."""
        if self._out is not None:
            _answer(
                self._out,
                LogUnavailable("its actor died while the log was asked: look at the log for the outcome"),
            )

    def _decide(self, tried: _Try) -> None:
        call = tried.call
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
        self._append(tried._replace(proposal=proposal, attempt=self.world.ids.random()))

    def _append(self, tried: _Try) -> None:
        world, ref, call = self.world, self.actor_ref, tried.call
        decision = Decision(
            attempt=tried.attempt,
            at=world.clock.now(),
            writer=world.site.coordinator,
            cause=call.cause or f"command:{type(call.command).__name__}",
            correlation=call.correlation or self.first_cause() or tried.attempt,
            facts=tried.proposal.facts,
            teardown=tried.proposal.teardown,
        )
        self.park()
        self._out = call
        world.crash.reach(f"{_name(tried.proposal)}:before-append")
        world.journal.append(decision, lambda outcome: _tell_first(ref, _Settled(tried, outcome)))

    def _settle(self, settled: _Settled) -> None:
        tried, outcome = settled
        match outcome:
            case Appended(facts=facts):
                self._stored(tried.call, tried.proposal, facts)
            case NotAppended(stored=False, code=code, detail=detail):
                self._out = None
                self.unpark()
                if tried.call.reply is None:
                    self.dropped(tried.call)
                else:
                    _answer(tried.call, LogFull(detail) if code == "full" else LogUnavailable(detail))
            case Conflicted():
                self._read_again(tried._replace(number=tried.number + 1))
            case NotAppended():
                doubtful = (*tried.doubtful, (tried.attempt, tried.proposal))
                self._read_again(tried._replace(number=tried.number + 1, doubtful=doubtful))

    def _stored(self, call: Call, proposal: Proposal, facts: tuple[Recorded, ...]) -> None:
        self.world.crash.reach(f"{_name(proposal)}:after-append")
        self._out = None
        self.apply(facts)
        self.unpark()
        _answer(call, proposal.result)

    def _read_again(self, tried: _Try) -> None:
        """Read what was missed; the mailbox stays parked, the thread does not wait."""
        world, ref = self.world, self.actor_ref
        own = tuple(fact.aggregate for _, proposal in tried.doubtful for fact in proposal.facts)
        wanted = dict.fromkeys((*self.aggregates(tried.call), *own))

        def read() -> None:
            try:
                facts = {aggregate: world.journal.read(aggregate) for aggregate in wanted}
            except LogUnavailable as error:
                logger.warning("%s cannot be read yet: %s", ", ".join(wanted), error)
                _tell_first(ref, _Reread(tried, None))
            else:
                _tell_first(ref, _Reread(tried, facts))

        try:
            world.reads.submit(read)
        except Refused:
            self._decide_again(_Reread(tried, None))

    def _decide_again(self, reread: _Reread) -> None:
        tried, facts = reread
        call, ref = tried.call, self.actor_ref
        if facts is None:
            key = f"{ref.actor_urn}:read"
            self.world.timers.set(key, LOG_RETRY_S, lambda: _tell_first(ref, _ReadNow(tried)))
            return
        for attempt, proposal in tried.doubtful:
            ours = [fact for read in facts.values() for fact in read if fact.attempt == attempt]
            if ours:  # it was stored after all: deciding anew would do it twice
                self._stored(call, proposal, tuple(sorted(ours, key=lambda fact: fact.sequence)))
                self.rehydrate(facts)
                return
        self._out = None
        self.rehydrate(facts)
        if tried.number >= DECISIONS_MOST:
            self.unpark()
            message = (
                f"another writer got there first {tried.number} times in a row: {', '.join(facts)}; try again"
            )
            if call.reply is None:
                logger.error("%s gives up on %r: %s", self, call.command, message)
                self.dropped(call)
            _answer(call, Conflict(message))
            return
        self._decide(tried)


def _name(proposal: Proposal) -> str:
    """Name a crash point by the last fact of a proposal, the one the others are for, without what only goes with one."""
    *others, event = [fact.event for fact in proposal.facts]
    while others and isinstance(event, SpawnStarted | ClaimRegistered | Up | Down):
        event = others.pop()
    return str(event.__struct_config__.tag)


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

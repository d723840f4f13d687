"""The mailbox of a pooled actor: what waits, in which order, and whether its actor is due for a turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, Full, SimpleQueue
from typing import Any, Final

from pykka import Actor, ActorDeadError, Future
from pykka._envelope import Envelope
from pykka.messages import _ActorStop

from actors.blocking import refuse_to_block
from actors.lending import lend

logger = logging.getLogger(__name__)

CLOSED: Final[Envelope[None]] = Envelope(None)
"""What `Mailbox.take` returns when the actor has stopped and its turn must tear down."""


class MailboxFull(RuntimeError):  # noqa: N818
    """The mailbox holds as many messages as it may; the message was not taken.

    Tell again when the actor has caught up, tell less, or raise the actor class's `mailbox_limit`.
    """


def answer(reply_to: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Settle `reply_to`; one that somebody has settled already is left as it is, and the log says so."""
    try:
        if error is None:
            reply_to.set(value)
        else:
            reply_to.set_exception((type(error), error, error.__traceback__))
    except Full:
        logger.warning("a reply was dropped: its future had been settled by somebody else")


class RunQueue(SimpleQueue["Mailbox | None"]):
    """The mailboxes whose actors are due, in order; None ends whoever takes it.

    `lends`: whether a thread outside the pool may serve a turn, see `actors.lending`.
    """

    def __init__(self, serve: Callable[[Mailbox], None], *, lends: bool) -> None:
        super().__init__()
        self.serve = serve
        self.lends = lends


class Mailbox:
    """Two bounded queues and the state that decides whether their actor waits for a turn.

    The front queue goes first, parked or not; the ordinary one waits while the actor is parked. The mailbox is
    in the run queue at most once, so no two threads ever serve one actor, and the run queue holds no more
    entries than there are actors.

    It is also the actor's `actor_stopped`: a stopped actor is one whose mailbox is closed, and one state cannot
    disagree with itself. That, one plain lock and queues which exist only while something waits in them keep an
    idle actor small (an empty `deque` alone is 0.7 kB, a `threading.Event` 0.6 kB).
    """

    __slots__ = (
        "_closed",
        "_front",
        "_lock",
        "_parked",
        "_queue",
        "_scheduled",
        "_stopped_event",
        "actor",
        "limit",
        "run_queue",
        "started",
    )

    def __init__(self) -> None:
        self.actor: Actor | None = None
        """Strong until the actor has ended: pykka's reference holds it only weakly."""
        self.limit = 0
        self.run_queue: RunQueue | None = None
        self.started = False
        """Whether the actor had its first turn. Touched by that actor's turn alone."""
        self._lock = threading.Lock()
        self._queue: deque[Envelope[Any]] | None = None
        self._front: deque[Envelope[Any]] | None = None
        self._scheduled = True  # what arrives before `open` waits for the first turn
        self._parked = False
        self._closed = False
        self._stopped_event: threading.Event | None = None

    def open(self) -> None:
        """Give the actor its first turn on `run_queue`, where all later ones follow."""
        self._schedule()

    def put(self, envelope: Envelope[Any]) -> None:
        """Add an ordinary message.

        Raises:
            MailboxFull: `limit` messages wait already, and this one is not pykka's request to stop.
            ActorDeadError: nobody will read it. A message with a future gets the error there instead.
        """
        with self._lock:
            wake = False
            if not self._closed:
                self._queue = self._added(self._queue, envelope)
                wake = not self._scheduled and not self._parked
                self._scheduled = self._scheduled or wake
            closed = self._closed
        self._after_put(envelope, closed=closed, wake=wake)

    def put_first(self, envelope: Envelope[Any]) -> None:
        """Add a message that goes ahead of all ordinary ones and is handled even while the actor is parked.

        Front messages keep the order among themselves and have a limit of their own, of the same size. Errors are
        those of `put`.
        """
        with self._lock:
            wake = False
            if not self._closed:
                self._front = self._added(self._front, envelope)
                wake = not self._scheduled
                self._scheduled = True
            closed = self._closed
        self._after_put(envelope, closed=closed, wake=wake)

    def _added(self, queue: deque[Envelope[Any]] | None, envelope: Envelope[Any]) -> deque[Envelope[Any]]:
        if queue is None:
            queue = deque()
        elif len(queue) >= self.limit and not isinstance(envelope.message, _ActorStop):
            raise MailboxFull(
                f"the mailbox of {self.actor} holds {len(queue)} messages, its limit: the message was not taken; "
                "tell again later or raise mailbox_limit"
            )
        queue.append(envelope)
        return queue

    def _after_put(self, envelope: Envelope[Any], *, closed: bool, wake: bool) -> None:
        if wake:
            self._schedule()
        if closed:
            self.refuse(envelope)
            if envelope.reply_to is None:
                raise ActorDeadError("the actor has stopped: the message was not taken")

    def take(self) -> Envelope[Any] | None:
        """The next message to handle; None when the turn is over; `CLOSED` when the actor must be torn down.

        After None another thread may already serve the actor: the caller must not touch it again.
        """
        with self._lock:
            if self._closed:
                return CLOSED
            if self._front:
                envelope = self._front.popleft()
                if not self._front:
                    self._front = None
                return envelope
            if self._queue and not self._parked:
                envelope = self._queue.popleft()
                if not self._queue:
                    self._queue = None
                return envelope
            self._scheduled = False
            return None

    def requeue(self) -> None:
        """End a turn that used up its messages: to the back of the run queue, still scheduled."""
        self._schedule()

    def park(self) -> None:
        """Hold back ordinary messages from now on. Parked already: nothing changes."""
        with self._lock:
            self._parked = True

    def unpark(self) -> None:
        """Let ordinary messages through again, from any thread. Not parked: nothing changes."""
        with self._lock:
            self._parked = False
            wake = bool(self._queue) and not self._scheduled
            self._scheduled = self._scheduled or wake
        if wake:
            self._schedule()

    def is_set(self) -> bool:
        """Whether the actor has stopped: nothing more is taken or handled."""
        return self._closed

    def set(self) -> None:
        """Close. What still waits is answered by the actor's last turn, which this schedules if need be."""
        with self._lock:
            wake = not self._closed and not self._scheduled
            self._closed = True
            self._scheduled = True
            event = self._stopped_event
        if event is not None:
            event.set()
        if wake:
            self._schedule()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the actor has stopped, at most `timeout` seconds; True when it has.

        Raises:
            BlockingInsideActor: called by a pooled actor, which must not wait.
        """
        refuse_to_block("actor_stopped.wait()")
        with self._lock:
            if self._closed:
                return True
            if self._stopped_event is None:
                self._stopped_event = threading.Event()
            event = self._stopped_event
        return event.wait(timeout)

    def empty(self) -> bool:
        """Whether nothing waits, parked or not."""
        with self._lock:
            return not self._front and not self._queue

    def get(self) -> Envelope[Any]:
        """Remove the next message, parked or not, without waiting.

        Raises:
            queue.Empty: nothing waits.
        """
        with self._lock:
            for queue in (self._front, self._queue):
                if queue:
                    return queue.popleft()
        raise Empty

    def drain(self) -> None:
        """Answer every message a stopped actor will not handle, and let go of the actor."""
        with self._lock:
            left = [*(self._front or ()), *(self._queue or ())]
            self._front = self._queue = None
        for envelope in left:
            if envelope.reply_to is not None and isinstance(envelope.message, _ActorStop):
                answer(envelope.reply_to)  # it asked for a stop, and stopped it is
            else:
                self.refuse(envelope)
        self.actor = None

    @staticmethod
    def refuse(envelope: Envelope[Any]) -> None:
        """Tell the future of a message, if it has one, that the actor is dead."""
        if envelope.reply_to is not None:
            error = ActorDeadError("the actor stopped before it handled the message")
            answer(envelope.reply_to, error=error)

    def _schedule(self) -> None:
        assert self.run_queue is not None, "an actor is scheduled by its start at the earliest"
        if not (self.run_queue.lends and lend(partial(self.run_queue.serve, self))):
            self.run_queue.put(self)

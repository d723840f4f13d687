"""A door for requests of those who are trusted with little: provisioners, and machines that have yet to get a credential."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from actors.errors import LogUnavailable
from infra.api.answering import answer_to, outcome, overloaded
from infra.api.messages import WAITING_S_MAX
from infra.doors.connection import Connection, Message, Subscribed
from infra.doors.workers import Workers

_LOG = logging.getLogger("fleetlog.api")

CarryOut = Callable[[Message], msgspec.Struct | None]
"""Reads a message and does what it asks; None: another coordinator will answer. Raises what `answer_to` knows."""


class PublicDoor:
    """Serves one kind of request from `start` to `close`.

    At most `threads` are carried out at once and `waiting_max` wait; whoever finds no room is told to ask again. An
    answer goes to an inbox below `inbox(message)` or nowhere: the sender chose the reply's subject, and we may publish
    on all of them, so that anywhere else it would speak through us.
    """

    def __init__(
        self,
        verb: str,
        connection: Connection,
        coordinator: str,
        carry_out: CarryOut,
        inbox: Callable[[Message], str],
        *,
        threads: int = 4,
        waiting_max: int = 1024,
    ) -> None:
        self._verb = verb
        self._connection = connection
        self._coordinator = coordinator
        self._carry_out = carry_out
        self._inbox = inbox
        self._workers = Workers(verb, threads=threads, waiting_max=waiting_max)
        self._subscription: Subscribed | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._counts_mutex = threading.Lock()

    def start(self, subject: str, queue: str = "") -> None:
        """Begin to serve; with `queue` one of the coordinators that share it serves each request."""
        self._subscription = self._connection.subscribe(subject, self._heard, queue=queue)

    def close(self) -> None:
        """Serve no more; what is being carried out gets a few seconds. Repeatable."""
        if self._subscription is not None:
            self._subscription.stop()
        self._workers.stop()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how many requests there were by (verb, outcome): `ok`, `elsewhere` or an error's code."""
        with self._counts_mutex:
            return dict(self._counts)

    def _heard(self, message: Message) -> None:
        came_s = time.monotonic()
        if not self._workers.offer(lambda: self._serve(message, came_s)):
            self._answer(message, overloaded())

    def _serve(self, message: Message, came_s: float) -> None:
        if time.monotonic() - came_s > WAITING_S_MAX:
            self._answer(message, overloaded())
            return
        answer = answer_to(self._verb, self._coordinator, lambda: self._carry_out(message))
        if answer is None:
            self._count("elsewhere")
        else:
            self._answer(message, answer)

    def _answer(self, message: Message, answer: msgspec.Struct) -> None:
        self._count(outcome(answer))
        if not message.reply:
            return
        if not message.reply.startswith(f"{self._inbox(message)}."):
            self._count("foreign-inbox")
            return
        try:
            self._connection.publish(message.reply, msgspec.json.encode(answer))
        except LogUnavailable as lost:
            _LOG.warning("an answer to %s was lost: %s; what was decided is in the log", self._verb, lost)

    def _count(self, what: str) -> None:
        with self._counts_mutex:
            self._counts[self._verb, what] += 1

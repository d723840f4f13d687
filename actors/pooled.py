"""The pooled actor runtime: pykka's actors, many of them on a few threads."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty
from typing import Any, ClassVar, Self, TypeVar, cast

from pykka import Actor, ActorRef, ActorRegistry, Future, ThreadingFuture
from pykka._envelope import Envelope

import actors.registry  # noqa: F401 - a pooled actor's end must not search a list of all actors
from actors.blocking import serve
from actors.mailbox import CLOSED, Mailbox, RunQueue, answer

logger = logging.getLogger("pykka")  # where the base class logs, too: one place to listen for actors

P = TypeVar("P", bound="PooledActor")


class PoolStopped(RuntimeError):  # noqa: N818
    """The pool was stopped: it starts no actor any more. Make a new `ActorPool`."""


class ActorPool:
    """A few daemon threads that serve any number of pooled actors, each by one thread at a time.

    A turn is at most `messages_per_turn` messages of one actor; then it goes to the back of the run queue. The
    threads start with the first actor. More than two gain nothing under the interpreter lock: handlers never block.
    With `workers=0` there are none, and whoever calls `run_turn` decides when an actor runs (simulations do).

    `on_death(actor, error)` may be set at any time. It is called on a pool thread, as the last thing, for each actor
    that ended without being asked to: `on_start` or the handling of a message raised. By then the actor is
    unregistered, `on_failure` has run and all its waiting asks are answered. The callback must not block; tell the
    supervisor. What it raises is logged. An `on_stop` that raises is logged too but is no death: the stop was wanted.
    """

    def __init__(self, *, workers: int = 2, messages_per_turn: int = 64, name: str = "actors") -> None:
        if workers < 0 or messages_per_turn < 1:
            raise ValueError("an actor pool needs workers >= 0 and messages_per_turn >= 1")
        self.messages_per_turn = messages_per_turn
        self.on_death: Callable[[PooledActor, BaseException], None] | None = None
        self._name = name
        self._worker_count = workers
        self._workers: list[threading.Thread] = []
        self._run_queue = RunQueue(self._serve, lends=workers > 0)
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: turns end after the message they are at."""
        return self._stopping

    def start(self, actor_class: type[P], *args: Any, **kwargs: Any) -> ActorRef[P]:
        """Construct an actor with these arguments, register it in pykka's registry and let it run here.

        Raises:
            PoolStopped: `stop` was called.
        """
        actor = actor_class(*args, **kwargs)
        ref = actor.actor_ref
        with self._lock:  # so that `stop` finds every actor that could ever wait for its threads
            if self._stopping:
                raise PoolStopped(
                    f"the actor pool {self._name} is stopped: {actor} was not started; use a new pool"
                )
            self._start_workers()
            ActorRegistry.register(ref)
            actor.mailbox.run_queue = self._run_queue
            actor._start_actor_loop()  # noqa: SLF001
        return ref

    def _start_workers(self) -> None:
        while len(self._workers) < self._worker_count:
            number = len(self._workers)
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._workers.append(thread)
            thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> bool:
        """End the threads, each after the message it is at, and drop the actors still here.

        Stop the actors first if their `on_stop` matters: those left are closed without it and without `on_death`,
        and their waiting asks get ActorDeadError. A second call changes nothing.

        Returns:
            Whether all threads ended within `timeout_s`. One stuck in a handler is left behind, a daemon.
        """
        with self._lock:
            self._stopping = True
            workers = [thread for thread in self._workers if thread is not threading.current_thread()]
        for _ in workers:
            self._run_queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in workers:
            thread.join(max(0.0, deadline - time.monotonic()))
        for ref in ActorRegistry.get_all():
            mailbox = ref.actor_inbox
            if isinstance(mailbox, Mailbox) and mailbox.run_queue is self._run_queue:
                ActorRegistry.unregister(ref)
                mailbox.set()
                mailbox.drain()
        return not any(thread.is_alive() for thread in workers)

    def run_turn(self) -> bool:
        """Serve the next actor on the calling thread; False when none is due. For a pool with `workers=0`."""
        try:
            mailbox = self._run_queue.get_nowait()
        except Empty:
            return False
        if mailbox is not None:
            self._serve(mailbox)
        return True

    def _work(self) -> None:
        while True:
            mailbox = self._run_queue.get()
            if mailbox is None or self._stopping:
                return
            self._serve(mailbox)

    def _serve(self, mailbox: Mailbox) -> None:
        actor = cast("PooledActor | None", mailbox.actor)
        if actor is None:  # dropped by `stop` meanwhile
            return
        outer = serve(actor)
        try:
            error = self._turn(actor)
            if error is not None and self.on_death is not None:
                self.on_death(actor, error)
        except BaseException:  # a pool thread outlives whatever an actor or a callback does
            logger.exception("on_death of the pool %s raised", self._name)
        finally:
            serve(outer)

    def _turn(self, actor: PooledActor) -> BaseException | None:
        try:
            return actor._take_turn(self)  # noqa: SLF001
        except (
            BaseException
        ) as error:  # around the handlers, e.g. an actor whose __str__ raises into our logging
            logger.exception("the runtime failed while it served an actor, which it ended")
            ActorRegistry.unregister(actor.actor_ref)
            actor.mailbox.set()
            actor.mailbox.drain()
            return error


class PooledActor(Actor):
    """A pykka actor without a thread of its own. All of pykka's public API works on it, with these differences.

    - A handler must not wait. `ask()` and `Future.get()` inside one raise BlockingInsideActor.
    - The mailbox has a limit; a full one raises MailboxFull to whoever tells or asks. A stop always fits.
    - `park` and `unpark` hold ordinary messages back; `tell_first` gets through.
    - A `BaseException` ends the actor that raised it and no other: a stray CancelledError must not take a fleet
      down. KeyboardInterrupt and SystemExit mean the process and stop all actors, as with pykka (without waiting for
      them). In each case an ask is answered with the exception, where pykka leaves its caller waiting.
    - A tell that loses the race against a stop raises ActorDeadError; pykka drops it.
    - `actor_stopped` is an object with `is_set`, `set` and `wait`, but no `threading.Event`.
    """

    pool: ClassVar[ActorPool] = ActorPool()
    """Where `start` lets the actor run, unless `ActorPool.start` names another one."""

    mailbox_limit: ClassVar[int] = 10_000
    """How many messages may wait, ordinary and front ones counted apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mailbox = self.mailbox
        mailbox.actor = self
        mailbox.limit = self.mailbox_limit
        self.actor_stopped = self._actor_ref.actor_stopped = cast("threading.Event", mailbox)

    @classmethod
    def start(cls, *args: Any, **kwargs: Any) -> ActorRef[Self]:
        """Start the actor on its class's `pool`."""
        return cls.pool.start(cls, *args, **kwargs)

    @property
    def mailbox(self) -> Mailbox:
        """The actor's inbox."""
        return cast("Mailbox", self.actor_inbox)

    def park(self) -> None:
        """Handle no ordinary message after the current one until `unpark`; front messages still come.

        Park *before* handing out the work whose outcome will unpark, or the outcome can overtake the parking. A stop
        is an ordinary message and waits too. Parking twice is parking once.
        """
        self.mailbox.park()

    def unpark(self) -> None:
        """Handle ordinary messages again. From any thread, any number of times."""
        self.mailbox.unpark()

    @staticmethod
    def _create_actor_inbox() -> Mailbox:
        return Mailbox()

    @staticmethod
    def _create_future() -> Future[Any]:
        return ThreadingFuture()

    def _start_actor_loop(self) -> None:
        self.mailbox.open()

    def _take_turn(self, pool: ActorPool) -> BaseException | None:
        """Handle up to a turn's messages; tear down when the actor has stopped. Returns what killed it, if so."""
        mailbox = self.mailbox
        error: BaseException | None = None
        if not mailbox.started:
            mailbox.started = True
            error = self._begin()
        for _ in range(pool.messages_per_turn):
            if error is not None:
                break
            envelope = mailbox.take()
            if envelope is None:
                return None
            if envelope is CLOSED:
                # It is still there if `actor_stopped.set()` came from outside.
                ActorRegistry.unregister(self.actor_ref)
                mailbox.drain()
                return None
            error = self._handle(envelope)
            if pool.stopping:
                break
        if error is None:
            mailbox.requeue()
        else:
            mailbox.drain()
        return error

    def _begin(self) -> BaseException | None:
        try:
            self.on_start()
        except BaseException as error:  # noqa: BLE001 - a pool thread outlives every actor
            self._handle_failure(*sys.exc_info())
            self._stop_all_on_exit(error)
            return error
        return None

    def _handle(self, envelope: Envelope[Any]) -> BaseException | None:
        """Handle one message; returns what killed the actor, if it did."""
        reply_to = envelope.reply_to
        try:
            response = self._handle_receive(envelope.message)
        except BaseException as error:
            if reply_to is not None and isinstance(error, Exception):
                logger.info("Exception returned from %s to caller:", self, exc_info=error)
                answer(reply_to, error=error)
                return None
            try:
                self._die(error)
            finally:
                if reply_to is not None:
                    answer(reply_to, error=error)
            self._stop_all_on_exit(error)
            return error
        if reply_to is not None:
            answer(reply_to, response)
        return None

    def _die(self, error: BaseException) -> None:
        info = (type(error), error, error.__traceback__)
        self._handle_failure(*info)
        try:
            self.on_failure(*info)
        except BaseException:  # noqa: BLE001
            self._handle_failure(*sys.exc_info())

    def _stop_all_on_exit(self, error: BaseException) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            logger.warning("%r in %s: stopping all actors", error, self)
            ActorRegistry.stop_all(block=False)


def tell_first(ref: ActorRef[Any], message: Any) -> None:
    """Tell a pooled actor ahead of all ordinary messages, even while it is parked.

    Raises:
        ActorDeadError: the actor is dead.
        MailboxFull: as many front messages as `mailbox_limit` wait already.
        TypeError: `ref` is no pooled actor's.
    """
    _mailbox_of(ref).put_first(Envelope(message))


def unpark(ref: ActorRef[Any]) -> None:
    """Let a parked actor handle ordinary messages again. From any thread, any number of times, dead actors included.

    Raises:
        TypeError: `ref` is no pooled actor's.
    """
    _mailbox_of(ref).unpark()


def _mailbox_of(ref: ActorRef[Any]) -> Mailbox:
    mailbox = ref.actor_inbox
    if not isinstance(mailbox, Mailbox):
        raise TypeError(f"{ref} is no PooledActor: it has neither a front queue nor parking; use tell()")
    return mailbox

"""The guard against waiting inside a pooled actor: it raises where the pool would deadlock.

The pool has a few threads. A handler that waits for another actor's reply holds one of them, and when all are held
nobody is left to reply. pykka has no hook for this, so importing the module puts the guard in front of
`ActorRef.ask` and `ThreadingFuture.get` themselves: a future of a ThreadingActor holds a pool thread just as well.
Threads which are not the pool's notice nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from pykka import ActorRef, ThreadingFuture

_served = threading.local()


class BlockingInsideActor(RuntimeError):  # noqa: N818
    """A pooled actor was about to wait, which can stop every actor of its pool.

    Tell the other actor and let it tell the reply back; `ask(block=False)` is fine as long as the future is read
    by somebody else.
    """


def serve(actor: object | None) -> object | None:
    """Mark this thread as serving `actor`, or nobody; returns whom it served before."""
    outer: object | None = getattr(_served, "actor", None)
    _served.actor = actor
    return outer


def refuse_to_block(what: str) -> None:
    """Raise when this thread serves a pooled actor.

    Raises:
        BlockingInsideActor: with the actor's name, `what` it tried and the way out.
    """
    actor = getattr(_served, "actor", None)
    if actor is not None:
        raise BlockingInsideActor(
            f"{actor} called {what} in its handler: waiting holds a thread of the pool and can stop every actor; "
            "tell the other actor and have the reply told back"
        )


def _guarded_ask(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(self: ActorRef[Any], message: Any, *, block: bool = True, timeout: float | None = None) -> Any:
        if block:  # before the message is sent: what was refused must not happen all the same
            refuse_to_block(f"ask(block=True) on {self}")
        return original(self, message, block=block, timeout=timeout)

    return ask


def _guarded_get(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get(self: ThreadingFuture[Any], *, timeout: float | None = None) -> Any:
        refuse_to_block("Future.get()")  # settled or not: whether it would wait is a matter of luck
        return original(self, timeout=timeout)

    return get


ActorRef.ask = _guarded_ask(ActorRef.ask)  # type: ignore[method-assign]
ThreadingFuture.get = _guarded_get(ThreadingFuture.get)  # type: ignore[method-assign]

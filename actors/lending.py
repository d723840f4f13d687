"""Threads that would only wait do the work themselves: waking another costs more than most turns (0.1 ms here)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack


class _Lent(threading.local):
    turns: list[Callable[[], None]] | None = None
    work: list[Callable[[], None]] | None = None


_lent = _Lent()


def lend(turn: Callable[[], None]) -> bool:
    """Leave an actor's turn to this thread, for the end of its `lent_thread` block; False when it is in none."""
    if _lent.turns is None:
        return False
    _lent.turns.append(turn)
    return True


def take_over(work: Callable[[], None]) -> bool:
    """Leave work that may block to this thread, for when its turns are over; False when it is in no `waiting_thread`."""
    if _lent.work is None:
        return False
    _lent.work.append(work)
    return True


class lent_thread:  # noqa: N801 - read as `with lent_thread():`
    """Serve with this thread, at the end of the block, the actors that the block's messages make due.

    For a thread that has nothing else to do. At most one turn of each actor; whom a turn tells is the pool's to
    serve. Hold no lock that a handler may want.
    """

    def __enter__(self) -> None:
        _lent.turns = []

    def __exit__(self, *_: object) -> None:
        turns, _lent.turns = _lent.turns, None
        for turn in turns or ():
            turn()


class waiting_thread(lent_thread):  # noqa: N801
    """The same for a thread that would wait for the outcome: it also does, after the turns, what they had to hand out.

    Bounded: it is the first step of each thing, and what follows from it goes the usual way.
    """

    def __exit__(self, *_: object) -> None:
        _lent.work = []
        try:
            super().__exit__()
        finally:
            work, _lent.work = _lent.work, None
            with ExitStack() as stack:  # all of it, also after one that raises
                for each in reversed(work or ()):
                    stack.callback(each)

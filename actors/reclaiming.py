"""The port to what may be left on a host: everything that bears our mark, whoever made it, and how to be rid of it."""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

Life = Literal[
    "dead",  # no process of it is there
    "alive",  # a process is there, and provably its own
    "doubt",  # something may be: it is left alone
]


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """One thing on the host, and whether something lives in it. `vm` and `owner` None: nobody can say whose.

    `address` is the one it has, or had, on the host's network; `age_s` how long its process runs.
    """

    kind: str
    name: str
    vm: str | None
    owner: str | None
    life: Life
    evidence: str
    scaler: str = ""
    address: str = ""
    pid: int | None = None
    age_s: float | None = None


class Reclaiming(Protocol):
    """One source of leftovers on one host. Blocking; called by one thread at a time."""

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return all there is, the living included. Changes nothing.

        Raises:
            DriverError: the listing failed or is partial; nothing may follow from it.
        """
        ...

    def reclaim(self, leftover: Leftover) -> str:
        """Take a dead one away, after looking once more whether it is, and return the evidence. Repeatable.

        Raises:
            DriverError: it lives, or may, or some of it is left.
        """
        ...

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """End a living machine nobody accounts for, then take it away; return how it ended.

        `accounted` is asked after the proof and immediately before the signal: what it returns, if anything, is why
        there is no signal.

        Raises:
            Refused: `accounted` said why, or it is not provably a machine of ours, or it does not run.
            DriverError: it could not be signalled, lives on, or some of it is left.
        """
        ...

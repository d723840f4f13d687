"""Port to the nft sets that hold what each address may reach: one atomic exchange per address."""

from typing import Protocol

from actors.errors import DriverError
from infra.network.policy import Element

CONTENTION_MOST = 100
"""Times an exchange is tried because somebody else changed the host's rules at the same moment: about 2 s."""

_PATIENT_TRIES = 4
_LONGEST_PAUSE_S = 0.02


def pause_s(tries: int) -> float:
    """Return how long to let others go first after so many tries: at first not at all."""
    return min(max(tries - _PATIENT_TRIES, 0) * 0.001, _LONGEST_PAUSE_S)


class PolicySets(Protocol):
    """Every call is one nft transaction, or raises `DriverError` and changed nothing. Safe from several threads."""

    def put(self, address: str, elements: frozenset[Element]) -> None:
        """Make `elements` all there is of `address`: what it had before, known to us or not, goes in the same step.

        Raises:
            DriverError: "missing" if the table or a set is not there; "refused" without the right.
        """

    def drop(self, address: str) -> None:
        """Remove everything of the address; nothing there is fine, and so is no table."""

    def held(self) -> dict[str, frozenset[Element]]:
        """Return everything there is, by address. Changes nothing.

        Raises:
            DriverError: "missing" if the table or a set is not there.
        """

    def close(self) -> None:
        """Let go of sockets. Repeatable."""


def no_table(table: str, reason: str) -> DriverError:
    """Return what it means that the table or one of its sets is not there."""
    message = f"nft table {table} or a set of it is not there ({reason}): run `fleetlog host provision`"
    return DriverError("missing", message, transient=True)


def contended(table: str) -> DriverError:
    """Return what it means that others change the host's rules all the time."""
    message = f"nft table {table}: the host's rules changed at each of {CONTENTION_MOST} tries; try again"
    return DriverError("timeout", message, transient=True)

"""The driver of cloud machines: there is no host to touch, so it only says so. What moves them is in the log."""

from collections.abc import Callable
from typing import Any

from actors.decisions.addresses import Lease
from actors.decisions.scale import BACKEND
from actors.driver import Abort, Exit, Found, Resource, SpawnOrder
from actors.errors import DriverError
from events.vm import Handle


class EventDriver:
    """Answers for machines that only their provisioners can see: nothing of them is here, and nothing is known."""

    backend = BACKEND

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        """Return nothing: the targets are in the request itself."""
        del vm, scaler, labels, lease
        return {}

    def spawn(self, order: SpawnOrder, abort: Abort) -> Handle:
        """Refuse: a cloud machine is started by its `scale.up`.

        Raises:
            DriverError: always.
        """
        del abort
        raise DriverError("refused", f"{order.vm} is started by its provisioner", transient=False)

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Return that only its provisioner knows."""
        del vm, placement, handle
        return Found(presence="unknown", evidence="only its provisioner can see it")

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Do nothing: its end is told by its provisioner, or by its agent's silence."""

    def destroy(self, vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
        """Refuse: a cloud machine is ended by its `scale.down`.

        Raises:
            DriverError: always.
        """
        del placement, handle, abort
        raise DriverError("refused", f"{vm} is ended by its provisioner", transient=False)

    def clear_bootstrap(self, vm: str, placement: dict[str, Any], handle: Handle) -> None:
        """Do nothing: its claim code is spent."""

    def survey(self) -> tuple[Resource, ...]:
        """Return nothing: none of it is on this host."""
        return ()

    def log_tail(self, vm: str, placement: dict[str, Any], lines: int) -> tuple[str, ...]:
        """Return nothing: what it writes stays with it."""
        del vm, placement, lines
        return ()

    def close(self) -> None:
        """Do nothing."""

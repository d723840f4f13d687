"""What a front door needs of the coordinator's NATS connection."""

from collections.abc import Callable
from typing import Protocol


class Message(Protocol):
    """What came in."""

    @property
    def subject(self) -> str:
        """Where it was published."""
        ...

    @property
    def reply(self) -> str:
        """Where the answer goes; empty: none is wanted."""
        ...

    @property
    def payload(self) -> bytes:
        """The payload."""
        ...


class Subscribed(Protocol):
    """A running subscription."""

    def stop(self) -> None:
        """End it. Repeatable."""
        ...


class Connection(Protocol):
    """What a door needs of the coordinator's NATS connection."""

    def publish(self, subject: str, payload: bytes) -> None:
        """Send; LogUnavailable when there is no server at the moment."""
        ...

    def subscribe(
        self, subject: str, callback: Callable[[Message], object], *, queue: str = ""
    ) -> Subscribed:
        """Call `callback` with each message, in a thread of this subscription alone; lasts over reconnects."""
        ...

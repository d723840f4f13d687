"""The driver port: what moves machines on a host, and what it says of them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from actors.decisions.addresses import Lease
from events.envelope import Resources
from events.vm import Handle


class Abort(Protocol):
    """Tells slow work that nobody waits for it any more."""

    def set(self) -> None:
        """Call it off."""
        ...

    def is_set(self) -> bool:
        """Tell whether it was called off."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is called off, at most `timeout` seconds; return whether it was."""
        ...


class SpawnOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All a driver needs to bring a machine up. `environment` has the credential and is never logged or stored."""

    vm: str
    scaler: str
    labels: tuple[str, ...]
    placement: dict[str, Any]
    environment: Mapping[str, str]
    limits: Resources


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A machine ended by itself. `exit_code` None: nobody could collect it; below zero: by that signal."""

    exit_code: int | None
    detail: str = ""


Presence = Literal[
    "absent",  # confirmed: nothing of it is on the host
    "half-made",  # traces but no running machine
    "running",  # and provably the one the log speaks of
    "foreign",  # something runs in its place that is provably not it
    "unknown",  # the host could not be asked, or the proof failed: spare it
]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver found on the host in the place of one machine, and how it knows."""

    presence: Presence
    evidence: str
    handle: Handle | None = None  # when running: enough to take it up, also if the log has none yet


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """Something on the host that this driver made for a machine: a process group, cgroup, directory, TAP."""

    kind: str
    name: str
    vm: str | None  # None: unknown owner, which is not an orphan
    owner: str | None
    detail: str = ""


class Driver(Protocol):
    """One backend type on one host. Knows no log and no other driver; keeps no truth of its own."""

    @property
    def backend(self) -> str:
        """Return the backend type, such as `bare-metal`."""
        ...

    def plan(
        self, vm: str, scaler: str, labels: tuple[str, ...], lease: Lease | None = None
    ) -> dict[str, Any]:
        """Return all that teardown will need (JSON values), before anything touches the host. Touches nothing.

        `lease` is the machine's address where the scaler has a network, None elsewhere.

        Raises:
            DriverError: this host cannot run such a machine; not transient when the config must change.
        """
        ...

    def spawn(self, order: SpawnOrder, abort: Abort) -> Handle:
        """Bring the machine up and return its handle as soon as it runs.

        On any failure leaves what it made to `destroy`, which is always called after a failed spawn. Ends
        soon after `abort` is set.

        Raises:
            DriverError: it does not run; kind `aborted` after an abort.
        """
        ...

    def inspect(self, vm: str, placement: dict[str, Any], handle: Handle | None) -> Found:
        """Look at the host for this machine. Never raises for what it finds; doubt is `unknown`."""
        ...

    def watch(
        self, vm: str, placement: dict[str, Any], handle: Handle, ended: Callable[[Exit], None]
    ) -> None:
        """Call `ended` once when the machine ends, within milliseconds, also if it has ended already.

        Works for a machine spawned here and for one taken up. `destroy` ends the watch; an end that `destroy`
        brought about may or may not be told.
        """
        ...

    def destroy(self, vm: str, placement: dict[str, Any], handle: Handle | None, abort: Abort) -> str:
        """Take the machine down from any half-state, and return the evidence that nothing is left.

        Idempotent. Signals nothing that is not provably this machine.

        Raises:
            DriverError: something is, or may be, left; to be tried again.
        """
        ...

    def clear_bootstrap(self, vm: str, placement: dict[str, Any], handle: Handle) -> None:
        """Remove what was left where the machine could read it, now that its agent has its configuration.

        Nothing to do for most drivers. A failure is the driver's to log: no life ends of it.
        """
        ...

    def survey(self) -> tuple[Resource, ...]:
        """Return every resource on the host that bears this driver's mark, whoever made it.

        Raises:
            DriverError: the listing failed or is partial; nobody may conclude anything from it.
        """
        ...

    def log_tail(self, vm: str, placement: dict[str, Any], lines: int) -> tuple[str, ...]:
        """Return the last lines the machine wrote, at most `lines`; empty when there is none or no capture."""
        ...

    def close(self) -> None:
        """Let go of watches and tails; machines run on."""
        ...

"""The few kinds of error, each saying what to do next; an assertion is our own bug."""

from typing import Literal

FailureKind = Literal[
    "missing",  # a binary, image or file is not there
    "refused",  # the host or the runtime said no, and will again
    "exhausted",  # no room: memory, disk, addresses, processes
    "timeout",  # it did not answer in time
    "aborted",  # we called it off
    "unreachable",  # the runtime or the server does not answer
    "still-there",  # a teardown could not be confirmed
    "unknown",
]


class Refused(Exception):  # noqa: N818 - the domain's answer, not an accident
    """The domain says no: the caller is told why, nothing was written.

    `code` is stable and machine-readable, such as `at-capacity` or `unknown-agent`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Conflict(Exception):  # noqa: N818 - a state of the log, not an accident
    """Another writer got there first, again and again; the bounded retries are spent and nothing was written."""


class LogUnavailable(Exception):  # noqa: N818
    """The log did not answer within its deadline. Whether the last append counts is found by reading the log."""


class LogFull(Exception):  # noqa: N818
    """The log is at its limit and refuses facts; `fleetlog log resize` raises it. Nothing is deleted to make room."""


class DriverError(Exception):
    """The world failed; becomes a fact.

    `transient` says whether the same command may work later: a missing binary is not transient, and backs the
    scaler off before its slot is freed.
    """

    def __init__(self, kind: FailureKind, message: str, *, transient: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.transient = transient


class RowsUnavailable(Exception):  # noqa: N818
    """The tables do not answer. The fleet works on; projections catch up when they are back."""


class RowsRefused(Exception):  # noqa: N818
    """These tables are not for this fleetlog: too old a server, too new a schema, no rights. Retrying cannot help."""


class RowRejected(Exception):  # noqa: N818
    """The database will never take one of these rows; the message has its reason."""


class StaleProjector(Exception):  # noqa: N818
    """Another projector moved the checkpoint: this one must load it again before it saves."""


class ViewHeld(Exception):  # noqa: N818
    """Another projector works on the view, here or on another coordinator; this one stands by."""

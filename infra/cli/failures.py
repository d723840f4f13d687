"""Which trouble is which: every expected failure's exit code and name; all else is a bug."""

from actors.errors import (
    Conflict,
    DriverError,
    LogFull,
    LogUnavailable,
    Refused,
    RowRejected,
    RowsRefused,
    RowsUnavailable,
)
from events.codec import Malformed
from infra.api.client import ApiRefused, NoCoordinator
from infra.cli.exits import CliError, ExitCode
from infra.config.problems import ConfigError
from infra.embedded.errors import DataDirectoryRefused
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.archive import ArchiveRefused
from infra.journal.stream import LogRefused
from projections.vm import BrokenLog

EXPECTED: tuple[tuple[type[Exception], ExitCode, str], ...] = (
    (NoCoordinator, ExitCode.UNREACHABLE, "no-coordinator"),
    (ConnectionRefusedByServer, ExitCode.UNREACHABLE, "nats-refused"),
    (LogUnavailable, ExitCode.UNREACHABLE, "log-unavailable"),
    (RowsUnavailable, ExitCode.UNREACHABLE, "tables-unavailable"),
    (RowsRefused, ExitCode.UNREACHABLE, "tables-refused"),
    (DataDirectoryRefused, ExitCode.UNREACHABLE, "data-directory"),
    (LogFull, ExitCode.REFUSED, "log-full"),
    (Conflict, ExitCode.REFUSED, "conflict"),
    (ArchiveRefused, ExitCode.FOUND, "archive-refused"),
    (LogRefused, ExitCode.FOUND, "log-refused"),
    (BrokenLog, ExitCode.FOUND, "broken-log"),
    (Malformed, ExitCode.FOUND, "broken-log"),
    (RowRejected, ExitCode.FOUND, "row-rejected"),
    (DriverError, ExitCode.FOUND, "host"),
    (ConfigError, ExitCode.FOUND, "config"),
    (TimeoutError, ExitCode.TIMEOUT, "timeout"),
)
"""Expected kinds of trouble, the more special ones first; everything else is a bug and shows its trace."""


def expected(error: Exception) -> CliError | None:
    """Return what to say and to end with; None: this is a bug of ours."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, ApiRefused | Refused):
        code = ExitCode.UNREACHABLE if error.code == "log-unavailable" else ExitCode.REFUSED
        if error.code == "timeout":
            code = ExitCode.TIMEOUT
        return CliError(code, error.code, str(error))
    for kind, code, name in EXPECTED:
        if isinstance(error, kind):
            return CliError(code, name, str(error))
    return None

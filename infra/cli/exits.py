"""What the command line ends with: the exit codes, and an expected failure."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a caller can rely on."""

    OK = 0
    FOUND = 1  # a check found something, or not everything asked for was given
    USAGE = 2  # the command or an option is wrong
    REFUSED = 3  # a coordinator said no, or there is no such thing
    UNREACHABLE = 4  # NATS, PostgreSQL or the coordinator does not answer, or will not have us
    TIMEOUT = 5  # it took longer than we wait
    INTERRUPTED = 130  # Ctrl-C


EPILOG = """\b
Exit codes:
  0    done
  1    a check found something (verify, doctor, config validate, a broken log),
       or not every agent asked for was given
  2    used wrongly
  3    refused, or there is no such agent or scaler; the reason is on stderr
  4    NATS, PostgreSQL or the coordinator does not answer
  5    it took too long
  130  interrupted with Ctrl-C
"""


class CliError(Exception):
    """An expected failure: one sentence with the way out, and the exit code."""

    def __init__(self, code: ExitCode, kind: str, message: str) -> None:
        super().__init__(message)
        self.exit_code = code
        self.kind = kind

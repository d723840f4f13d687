"""Crash points: inert in production; in tests the process dies at the one the environment names."""

import os
import signal

VARIABLE = "FLEETLOG_CRASH_AT"
"""`NAME` dies at the first pass of that point, `NAME#3` at the third."""


class NoCrash:
    """Every point is passed."""

    def reach(self, name: str) -> None:
        """Pass."""


class CrashAt:
    """SIGKILLs this process at the n-th pass of one named point: no handler, no flush, as a power cut would."""

    def __init__(self, name: str, passes: int) -> None:
        self._name = name
        self._left = passes

    def reach(self, name: str) -> None:
        """Die here, if this is the point and the pass."""
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def crash_points(environment: dict[str, str]) -> NoCrash | CrashAt:
    """Return the points the environment asks for; none in production."""
    wanted = environment.get(VARIABLE)
    if not wanted:
        return NoCrash()
    name, _, passes = wanted.partition("#")
    return CrashAt(name, int(passes or 1))

"""Crash points: inert unless the environment names one, and then the n-th pass of it is the last instruction."""

import signal
import subprocess
import sys

import pytest

from infra.crash import VARIABLE, CrashAt, NoCrash, crash_points

PROGRAM = """
import os
from infra.crash import crash_points
points = crash_points(dict(os.environ))
try:
    for name in ("one", "two", "one", "two", "one"):
        points.reach(name)
        print(name, flush=True)
finally:
    print("a handler ran", flush=True)
"""


def passes(wanted: str) -> tuple[int, list[str]]:
    """Run the program and return its exit code and the points it passed."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={VARIABLE: wanted, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return run.returncode, run.stdout.splitlines()


@pytest.mark.parametrize(
    ("wanted", "passed"),
    [
        ("one", []),
        ("two", ["one"]),
        ("one#2", ["one", "two"]),
        ("one#3", ["one", "two", "one", "two"]),
    ],
)
def test_the_process_dies_at_the_pass_that_was_named_and_runs_no_handler(
    wanted: str, passed: list[str]
) -> None:
    assert passes(wanted) == (-signal.SIGKILL, passed)


def test_another_point_or_a_later_pass_is_passed() -> None:
    everything = ["one", "two", "one", "two", "one", "a handler ran"]
    assert passes("three") == (0, everything)
    assert passes("one#4") == (0, everything)


def test_nothing_is_armed_in_production() -> None:
    assert isinstance(crash_points({}), NoCrash)
    assert isinstance(crash_points({VARIABLE: ""}), NoCrash)
    assert isinstance(crash_points({VARIABLE: "one"}), CrashAt)
    crash_points({}).reach("anything")


def test_a_number_that_is_none_is_told_at_the_start() -> None:
    with pytest.raises(ValueError, match="often"):
        crash_points({VARIABLE: "one#often"})

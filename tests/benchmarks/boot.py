"""How long a coordinator takes to start over a log with many dead, from tables and tail and from the log alone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import msgspec

from tests.benchmarks.coordinator_process import Report
from tests.benchmarks.figures import Figure, middle
from tests.benchmarks.lives import prepare
from tests.benchmarks.stage import Stage, say

BELOW_S = 3.0
ROUNDS_MOST = 3
START_S_MAX = 600


class Prepared(msgspec.Struct, frozen=True):
    """A data directory, how many of its lives are over, and when it was written."""

    directory: Path
    dead: int
    written_s: float


def measure(stage: Stage) -> list[Figure]:
    """Measure for each number of dead; the baseline of all is the start with the fewest.

    NATS reads the last five minutes of the log when it starts, to know its message ids again. So each directory is
    first started right after its lives were written, and then, for the figures that count, when it has aged.
    """
    fresh: list[Figure] = []
    prepared: list[Prepared] = []
    for dead in sorted(stage.scale.dead, reverse=True):
        prepared.append(_prepare(stage, dead))
        fresh.append(_fresh(stage, prepared[-1]))
    figures: list[Figure] = []
    least: Figure | None = None
    for each in reversed(prepared):
        _age(each, stage.scale.age_s)
        warm, *others = _boots(stage, each)
        if least is not None:
            warm = msgspec.structs.replace(
                warm, baseline=least.value, baseline_name=f"with {stage.scale.dead[0]} dead"
            )
        least = least or warm
        figures += [warm, *others]
    return figures + fresh[::-1]


def _prepare(stage: Stage, dead: int) -> Prepared:
    directory = stage.directory(f"boot-{dead}")
    began = time.perf_counter()
    facts = prepare(directory, dead=dead, live=stage.scale.live, tables=True)
    say(f"boot: {facts} facts and their tables written in {time.perf_counter() - began:.0f} s")
    return Prepared(directory, dead, time.monotonic())


def _fresh(stage: Stage, each: Prepared) -> Figure:
    report = _warm(stage, each)
    say(f"boot with {each.dead} dead, right after they were written: {_parts(report)}")
    return Figure(
        benchmark="boot",
        name=f"warm, right after the lives were written, {each.dead} dead + {stage.scale.live} live",
        value=report.taken_up_s,
        unit="s",
        scripted=True,
    )


def _warm(stage: Stage, each: Prepared) -> Report:
    report = start_process(each.directory, tables=True)
    if (report.source, report.live) != ("tables", stage.scale.live):
        raise RuntimeError(f"that was no warm boot: {report}")
    return report


def _age(each: Prepared, age_s: float) -> None:
    left_s = each.written_s + age_s - time.monotonic()
    if left_s > 0:
        say(f"boot: waits {left_s:.0f} s until the log has aged")
        time.sleep(left_s)


def start_process(directory: Path, *, tables: bool) -> Report:
    """Start a coordinator in a process of its own, let it stop, and return what it reports."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.coordinator_process",
        str(directory),
        "tables" if tables else "none",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=START_S_MAX, check=True)
    return msgspec.json.decode(done.stdout, type=Report)


def _boots(stage: Stage, each: Prepared) -> list[Figure]:
    scale, dead = stage.scale, each.dead
    reports = []
    for number in range(min(scale.rounds, ROUNDS_MOST)):
        reports.append(_warm(stage, each))
        say(f"boot with {dead} dead, round {number + 1}: {_parts(reports[-1])}")
    without = start_process(each.directory, tables=False)
    say(f"boot with {dead} dead, no tables: {_parts(without)}")
    value, spread = middle([report.taken_up_s for report in reports])
    lives = f"{dead} dead + {scale.live} live"

    def part(name: str, value_s: float) -> Figure:
        return Figure(
            benchmark="boot", name=f"  of it {name}, {lives}", value=value_s, unit="s", scripted=True
        )

    return [
        Figure(
            benchmark="boot",
            name=f"warm: servers, state, doors, all taken up, {lives}",
            value=value,
            unit="s",
            spread=spread,
            value_below=BELOW_S,
            scripted=True,
        ),
        part("NATS and PostgreSQL", median(report.servers_s for report in reports)),
        part("the fleet from tables and tail", median(report.state_s for report in reports)),
        part("actors and hosts asked", median(report.actors_s for report in reports)),
        Figure(
            benchmark="boot",
            name=f"without tables, the whole log: all taken up, {lives}",
            value=without.taken_up_s,
            unit="s",
            scripted=True,
        ),
    ]


def _parts(report: Report) -> str:
    return (
        f"taken up {report.taken_up_s:.2f} s, doors open {report.start_s:.2f} s, servers {report.servers_s:.2f} s, "
        f"state {report.state_s:.3f} s from {report.source} and {report.replayed} facts, "
        f"actors {report.actors_s:.3f} s, before it imports {report.imports_s:.2f} s"
    )

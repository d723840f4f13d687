"""What an idle agent costs a coordinator in memory: two processes that differ in nothing but how many they watch."""

from __future__ import annotations

from tests.benchmarks.boot import start_process
from tests.benchmarks.coordinator_process import Report
from tests.benchmarks.figures import Figure, middle
from tests.benchmarks.lives import prepare
from tests.benchmarks.stage import Stage, say


def measure(stage: Stage) -> list[Figure]:
    """Measure resident memory of coordinators with none and with many registered, silent machines."""
    idle, rounds = stage.scale.idle, min(stage.scale.rounds, 3)
    empty: list[float] = []
    full: list[float] = []
    for number in range(rounds):
        empty.append(_resident(stage, 0))
        full.append(_resident(stage, idle))
        say(
            f"memory, round {number + 1}: {empty[-1] / 1e6:.1f} MB with none, {full[-1] / 1e6:.1f} MB with {idle}"
        )
    each, spread = middle([(more - less) / idle / 1000 for more, less in zip(full, empty, strict=True)])
    return [
        Figure(
            benchmark="memory",
            name=f"per idle agent, of {idle}",
            value=each,
            unit="kB",
            spread=spread,
            scripted=True,
        ),
        Figure(
            benchmark="memory", name="a coordinator without agents", value=middle(empty)[0] / 1e6, unit="MB"
        ),
    ]


def _resident(stage: Stage, live: int) -> float:
    directory = stage.directory(f"memory-{live}")
    prepare(directory, dead=0, live=live, tables=False)
    report: Report = start_process(directory, tables=False)
    if report.live != live:
        raise RuntimeError(f"{live} machines are live, and the coordinator has {report.live}")
    return report.resident_bytes

"""The whole log read and folded; beside the fastest nats-py loop that only reads and decodes, and a plain socket."""

from __future__ import annotations

import gc
import time

from infra.journal.nats import NatsJournal
from projections.boot import fold_fleet
from tests.benchmarks import bare
from tests.benchmarks.figures import Figure, middle, paired
from tests.benchmarks.lives import journal_of, write_log
from tests.benchmarks.stage import CLUSTER, Stage, say, servers

AT_LEAST = 0.8
ROUNDS_MOST = 3


def measure(stage: Stage) -> list[Figure]:
    """Measure for each number of dead lives."""
    return [figure for dead in stage.scale.dead for figure in _replays(stage, dead)]


def _replays(stage: Stage, dead: int) -> list[Figure]:
    live, rounds = stage.scale.live, min(stage.scale.rounds, ROUNDS_MOST)
    ours: list[float] = []
    unfolded: list[float] = []
    loops: list[float] = []
    sockets: list[float] = []
    with servers(stage.directory(f"replay-{dead}")) as started:
        journal = journal_of(started)
        try:
            began = time.perf_counter()
            facts = write_log(journal, dead, live)
            say(f"replay: {facts} facts written in {time.perf_counter() - began:.1f} s")
            for number in range(rounds):
                loops.append(bare.read_with_nats_py(started.address, CLUSTER, facts))
                ours.append(folded(journal, facts, live))
                sockets.append(bare.read_with_socket(started.address, CLUSTER, facts))
                unfolded.append(_read_only(journal, facts))
                say(
                    f"replay of {facts}, round {number + 1}: folded {ours[-1]:.0f}/s, read {unfolded[-1]:.0f}/s, "
                    f"nats-py {loops[-1]:.0f}/s, socket {sockets[-1]:.0f}/s"
                )
        finally:
            journal.close()
    value, spread = middle(ours)
    loop, plain = middle(loops)[0], middle(sockets)[0]
    read, read_spread = middle(unfolded)
    lives = f"{dead} dead + {live} live"
    return [
        Figure(
            benchmark="replay",
            name=f"read, decode and fold {facts} facts, {lives}",
            value=value,
            unit="facts/s",
            spread=spread,
            baseline=loop,
            paired_ratio=paired(ours, loops),
            baseline_name="nats-py loop, decode",
            ratio_at_least=AT_LEAST,
        ),
        Figure(
            benchmark="replay",
            name=f"journal alone, no fold, {lives}",
            value=read,
            unit="facts/s",
            spread=read_spread,
            baseline=plain,
            paired_ratio=paired(unfolded, sockets),
            baseline_name="plain socket, decode",
        ),
        Figure(
            benchmark="replay",
            name=f"the whole fleet known, no tables, {lives}",
            value=facts / value,
            unit="s",
            baseline=facts / plain,
            baseline_name="plain socket, decode",
        ),
    ]


def folded(journal: NatsJournal, facts: int, live: int) -> float:
    """Return facts a second of a replay that ends in the fleet's state."""
    gc.collect()
    began = time.perf_counter()
    state = fold_fleet(journal.replay())
    took = time.perf_counter() - began
    assert (state.last_sequence, len(state.vms)) == (facts, live), "the replay is not the log"
    return facts / took


def _read_only(journal: NatsJournal, facts: int) -> float:
    gc.collect()
    began = time.perf_counter()
    read = sum(1 for _ in journal.replay())
    took = time.perf_counter() - began
    assert read == facts, "the replay is not the log"
    return facts / took

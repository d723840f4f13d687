"""From a demand to the command that starts its machine, and to its agent being in: pretended machines, and processes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from actors.commands import AgentDone, Demand, RegisterAgent
from events import subjects
from events.envelope import Recorded
from events.vm import Registered
from infra.agent.access import NatsAgentAccess
from infra.app import Coordinator
from infra.drivers.scripted import Script, ScriptedDriver
from tests.benchmarks import bare
from tests.benchmarks.append import BARE, example_payload
from tests.benchmarks.asker import Order
from tests.benchmarks.figures import Figure, middle, percentile
from tests.benchmarks.pace import paced
from tests.benchmarks.stage import (
    LABELS,
    Stage,
    address_of,
    coordinator,
    fleet,
    process_scaler,
    say,
    scripted_scaler,
    wait_until,
)

BELOW_MS = 10.0
AGENT_THREADS = 4
AGENT = Path(sys.executable).parent / "fleetlog-agent"
JOB = "/bin/true"


def measure(stage: Stage) -> list[Figure]:
    """Measure with the whole coordinator at work: doors, projectors, metrics, and every life lived to its end."""
    scripted = fleet(scripted_scaler(100_000))
    with coordinator(stage.directory("demand"), scripted, tables=True) as running:
        figures = _pretended(running, stage)
    processes = fleet(process_scaler((str(AGENT), "--", JOB)))
    with coordinator(stage.directory("demand-processes"), processes, tables=True) as running:
        figures += _processes(running, stage)
    return figures


class Lives:
    """Notes when each spawn is entered, and plays the agents: in, configured, done."""

    def __init__(self, running: Coordinator) -> None:
        self.entered_s: dict[str, float] = {}
        self.registered_s: dict[str, float] = {}
        self._running = running
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        (driver,) = running.world.drivers.values()
        assert isinstance(driver, ScriptedDriver)
        driver._script = self._spawn
        self._threads = [threading.Thread(target=self._play) for _ in range(AGENT_THREADS)]
        for thread in self._threads:
            thread.start()

    def ask(self) -> str | None:
        """Ask the front door for one agent."""
        front_door = self._running.fleet
        return front_door.demand(Demand(id=self._running.ids.random(), labels=LABELS))[0].vm

    def stop(self) -> None:
        """Let the players end."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def milliseconds(self, asked: list[tuple[str | None, float]], until: dict[str, float]) -> list[float]:
        """Return how long it took from each demand until the time noted for its machine.

        Raises:
            RuntimeError: a demand was not admitted: there is nothing to measure.
        """
        promised = [(vm, due_s) for vm, due_s in asked if vm is not None]
        if len(promised) != len(asked):
            raise RuntimeError(f"{len(asked) - len(promised)} demands were refused")
        wait_until(lambda: all(vm in self.registered_s for vm, _ in promised), "all agents are in", 60)
        return [(until[vm] - due_s) * 1000 for vm, due_s in promised]

    def _spawn(self, vm: str) -> Script:
        if vm not in self.entered_s:
            self.entered_s[vm] = time.monotonic()
            self._waiting.put(vm)
        return Script()

    def _play(self) -> None:
        door = self._running.fleet
        while (vm := self._waiting.get()) is not None:
            door.register(RegisterAgent(vm=vm, session=f"session-{vm}"))
            self.registered_s[vm] = time.monotonic()
            door.config_acked(vm, f"session-{vm}")
            door.done(AgentDone(vm=vm, session=f"session-{vm}", exit_code=0))


class Samples:
    """Latencies of one kind, round by round: a percentile is that of each round, and the median round counts."""

    def __init__(self) -> None:
        self.rounds: list[list[float]] = []

    def of(self, part: float) -> tuple[float, tuple[float, float]]:
        """Return the median of the rounds' percentiles, and the lowest and highest."""
        return middle([percentile(each, part) for each in self.rounds])

    def __str__(self) -> str:
        last = self.rounds[-1]
        return f"{percentile(last, 0.5):.1f}/{percentile(last, 0.99):.1f}"


def _pretended(running: Coordinator, stage: Stage) -> list[Figure]:
    scale = stage.scale
    rate, count = scale.demand_rate, scale.demand_rate * scale.demand_s
    bare.make_stream(address_of(running), BARE)
    payload = example_payload(running)
    to_spawn, over_nats, to_registered = Samples(), Samples(), Samples()
    writes = {1: Samples(), 3: Samples()}
    lives = Lives(running)
    try:
        paced(rate, rate, lives.ask)  # what a first second loads and opens is not what is measured
        for number in range(scale.rounds):
            for publishes, samples in writes.items():
                samples.rounds.append(_bare_lives(running, payload, count, rate, publishes))
            direct = paced(rate, count, lives.ask)
            to_spawn.rounds.append(lives.milliseconds(direct, lives.entered_s))
            to_registered.rounds.append(lives.milliseconds(direct, lives.registered_s))
            asked = _asked_over_nats(running, rate, count)
            over_nats.rounds.append(lives.milliseconds(asked, lives.entered_s))
            say(
                f"demand, round {number + 1}, ms p50/p99: to spawn {to_spawn}, over NATS {over_nats}, bare {writes[1]}; "
                f"to registered {to_registered}, bare {writes[3]}"
            )
    finally:
        lives.stop()
    base = {number: f"nats-py, batch and {number} publishes" for number in (1, 3)}
    return [
        *_latency(f"front door to spawn, {rate}/s", to_spawn, writes[1], base[1], below_ms=BELOW_MS),
        *_latency(f"NATS request to spawn, {rate}/s", over_nats, writes[1], base[1], below_ms=BELOW_MS),
        *_latency(f"front door to registered, {rate}/s", to_registered, writes[3], base[3]),
    ]


def _bare_lives(running: Coordinator, payload: bytes, count: int, rate: int, publishes: int) -> list[float]:
    address = address_of(running)
    took_s = bare.paced_lives(address, BARE, payload, count=count, rate=rate, publishes=publishes)
    return [each_s * 1000 for each_s in took_s]


def _asked_over_nats(running: Coordinator, rate: int, count: int) -> list[tuple[str | None, float]]:
    address = address_of(running)
    order = Order(url=address.url, creds=str(address.creds), rate=rate, count=count)
    command = [sys.executable, "-m", "tests.benchmarks.asker", msgspec.json.encode(order).decode()]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    return msgspec.json.decode(done.stdout, type=list[tuple[str | None, float]])


def _latency(
    name: str,
    ours: Samples,
    baseline: Samples,
    baseline_name: str,
    *,
    below_ms: float | None = None,
    scripted: bool = True,
) -> list[Figure]:
    figures = []
    for part in (0.5, 0.99):
        value, spread = ours.of(part)
        figures.append(
            Figure(
                benchmark="demand",
                name=f"{name}, p{part * 100:.0f}",
                value=value,
                unit="ms",
                spread=spread if len(ours.rounds) > 1 else None,
                baseline=baseline.of(part)[0],
                baseline_name=baseline_name,
                value_below=below_ms if part > 0.5 else None,
                scripted=scripted,
            )
        )
    return figures


def _processes(running: Coordinator, stage: Stage) -> list[Figure]:
    """Start real agents one after the other: by a demand, and by hand."""
    registered: dict[str, float] = {}
    heard: dict[str, float] = {}

    def observe(fact: Recorded) -> None:
        if isinstance(fact.event, Registered):
            registered[fact.aggregate.removeprefix("vm.")] = time.monotonic()

    running.world.router.observers.append(observe)
    running.connection.subscribe(
        subjects.all_agents(BARE, "register"),
        lambda message: heard.setdefault(message.subject.split(".")[3], time.monotonic()),
    )
    ours, alone = Samples(), Samples()
    ours.rounds.append([])
    alone.rounds.append([])
    forks: list[float] = []
    for number in range(stage.scale.processes + 1):
        demanded = _until_registered(running, registered)
        started = _bare_agent(running, f"bare-{number}", heard)
        if number:  # the first ones find no file in the page cache
            ours.rounds[0].append(demanded)
            alone.rounds[0].append(started)
            forks.append(_fork_and_exec())
    say(
        f"real agents, ms p50/p99: {ours}, bare {alone}; fork and exec of {JOB} alone {percentile(forks, 0.5):.1f}"
    )
    return _latency(
        "bare-metal: front door to registered, one at a time",
        ours,
        alone,
        "fork+exec of the same agent until it knocks",
        scripted=False,
    )


def _until_registered(running: Coordinator, registered: dict[str, float]) -> float:
    began_s = time.monotonic()
    (answer,) = running.fleet.demand(Demand(id=running.ids.random(), labels=LABELS))
    vm = answer.vm
    if vm is None:
        raise RuntimeError(f"the demand was not admitted: {answer.message}")
    wait_until(lambda: vm in registered, f"agent {vm} is in", 60)
    wait_until(lambda: vm not in running.world.router.vms, f"{vm} is reaped", 60)
    return (registered[vm] - began_s) * 1000


def _bare_agent(running: Coordinator, vm: str, heard: dict[str, float]) -> float:
    """Start the same command with the same kind of environment, where nobody has decided or stored anything."""
    access = NatsAgentAccess(
        cluster=BARE,
        nats_url=address_of(running).url,
        clock=running.clock,
        signer=running.servers.signer,
    )
    environment = {"PATH": os.environ["PATH"], **access.environment(vm, LABELS)}
    began_s = time.monotonic()
    process = subprocess.Popen(
        [AGENT, "--", JOB],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: vm in heard, f"the bare agent {vm} knocks", 60)
    finally:
        process.kill()
        process.wait()
    return (heard[vm] - began_s) * 1000


def _fork_and_exec() -> float:
    began_s = time.monotonic()
    process = subprocess.Popen([JOB], stdin=subprocess.DEVNULL)
    took_ms = (time.monotonic() - began_s) * 1000
    process.wait()
    return took_ms

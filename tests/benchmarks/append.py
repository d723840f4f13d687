"""Appends through the actor path: command, decision, durable facts, fold, answer; beside nats-py publishing as much."""

from __future__ import annotations

import threading
import time

from actors.commands import Demand, RegisterAgent
from actors.decisions.vm import NoteConfigAcked
from actors.world import Call, tell
from events import subjects
from events.codec import Form, encode
from events.vm import Registered
from infra.app import Coordinator
from tests.benchmarks import bare
from tests.benchmarks.figures import Figure, middle, paired
from tests.benchmarks.stage import (
    COORDINATOR,
    LABELS,
    Scale,
    Stage,
    address_of,
    coordinator,
    fleet,
    say,
    scripted_scaler,
    wait_until,
)

AT_LEAST = 0.7
BARE = "bare"
PUBLISH = "publish, pipelined"
BATCHES = (100, 500)
"""The journal's batches are between a few facts and 500."""


def measure(stage: Stage) -> list[Figure]:
    """Measure one at a time and in parallel; rounds of product and baseline take turns on one server."""
    scale = stage.scale
    machines = scale.rounds * (scale.singles + scale.agents)
    with coordinator(stage.directory("append"), fleet(scripted_scaler(machines + 1000))) as running:
        bare.make_stream(address_of(running), BARE)
        payload = example_payload(running)
        singles, parallel = _one_by_one(running, payload, scale), _parallel(running, payload, scale)
    return [*singles, *parallel]


def begin_machines(running: Coordinator, count: int) -> list[str]:
    """Bring up so many machines, which wait for their agents then."""
    vms: list[str] = []
    while len(vms) < count:
        wanted = min(100, count - len(vms))
        demand = Demand(id=running.ids.random(), labels=LABELS, count=wanted)
        vms += [answer.vm for answer in running.fleet.demand(demand) if answer.vm is not None]
    refs = running.world.router.vms

    def up() -> bool:
        actors = [refs[vm]._actor_weakref() for vm in vms]
        return all(actor is not None and actor.state.phase == "spawned" for actor in actors)

    wait_until(up, "all machines are spawned")
    return vms


def example_payload(running: Coordinator) -> bytes:
    """Return a fact as the product writes it, for the baseline to publish."""
    vm, attempt = running.ids.vm(running.clock.now()), running.ids.random()
    return encode(
        Form(
            aggregate=subjects.vm(vm),
            version=4,
            at=running.clock.now(),
            writer=COORDINATOR,
            cause=f"agent:session-{vm}",
            correlation=attempt,
            attempt=attempt,
            event=Registered(session=f"session-{vm}"),
        )
    )


def _one_by_one(running: Coordinator, payload: bytes, scale: Scale) -> list[Figure]:
    ours: list[float] = []
    baselines: list[float] = []
    guarded: list[float] = []
    for number in range(scale.rounds):
        vms = begin_machines(running, scale.singles)
        baselines.append(bare.publish_one_by_one(address_of(running), BARE, payload, scale.singles))
        guarded.append(
            bare.publish_one_by_one(address_of(running), BARE, payload, scale.singles, guarded=True)
        )
        began = time.perf_counter()
        for vm in vms:
            running.fleet.register(RegisterAgent(vm=vm, session=f"session-{vm}"))
        ours.append(scale.singles / (time.perf_counter() - began))
        say(f"append one at a time, round {number + 1}: {ours[-1]:.0f}/s, bare {baselines[-1]:.0f}/s")
    value, spread = middle(ours)
    against = {"nats-py js.publish": baselines, "nats-py js.publish, guarded": guarded}
    return [
        Figure(
            benchmark="append",
            name="one at a time, through front door and actor",
            value=value,
            unit="facts/s",
            spread=spread,
            baseline=middle(rates)[0],
            paired_ratio=paired(ours, rates),
            baseline_name=name,
            ratio_at_least=AT_LEAST if rates is baselines else None,
        )
        for name, rates in against.items()
    ]


def _parallel(running: Coordinator, payload: bytes, scale: Scale) -> list[Figure]:
    ours: list[float] = []
    rates: dict[str, list[float]] = {}
    for number in range(scale.rounds):
        vms = begin_machines(running, scale.agents)
        for name, rate in _baselines(running, payload, 2 * scale.agents).items():
            rates.setdefault(name, []).append(rate)
        ours.append(2 * len(vms) / register_and_acknowledge(running, vms))
        bare_rates = ", ".join(f"{name} {each[-1]:.0f}/s" for name, each in rates.items())
        say(f"append in parallel, round {number + 1}: {ours[-1]:.0f}/s; {bare_rates}")
    value, spread = middle(ours)
    medians = {name: middle(each)[0] for name, each in rates.items()}
    return [
        Figure(
            benchmark="append",
            name=f"{scale.agents} actors at once, two facts each",
            value=value,
            unit="facts/s",
            spread=spread,
            baseline=baseline,
            paired_ratio=paired(ours, rates[name]),
            baseline_name=f"nats-py {name}",
            ratio_at_least=AT_LEAST if name == PUBLISH else None,
        )
        for name, baseline in medians.items()
    ]


def _baselines(running: Coordinator, payload: bytes, count: int) -> dict[str, float]:
    address, most = address_of(running), max(BATCHES)
    rates = {
        f"atomic batches of {size}": bare.publish_batches(address, BARE, payload, count, size)
        for size in BATCHES
    }
    rates[f"atomic batches of {most}, guarded"] = bare.publish_batches(
        address, BARE, payload, count, most, guarded=True
    )
    rates[PUBLISH] = bare.publish_pipelined(address, BARE, payload, count // 4)
    return rates


def register_and_acknowledge(running: Coordinator, vms: list[str]) -> float:
    """Let every machine's agent register and acknowledge its configuration; return the seconds until all is durable."""
    refs = running.world.router.vms
    left = len(vms)
    lock, finished = threading.Lock(), threading.Event()

    def acknowledged(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0:
                finished.set()

    def registered(vm: str) -> None:
        tell(refs[vm], Call(NoteConfigAcked(session=f"session-{vm}"), reply=acknowledged, cause="agent"))

    began = time.perf_counter()
    for vm in vms:
        command = RegisterAgent(vm=vm, session=f"session-{vm}")
        tell(refs[vm], Call(command, reply=lambda _, vm=vm: registered(vm), cause="agent"))  # type: ignore[misc]
    if not finished.wait(300):
        raise TimeoutError(f"{left} of {len(vms)} agents are not in")
    return time.perf_counter() - began

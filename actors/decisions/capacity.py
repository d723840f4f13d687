"""Who gets capacity: one decision over the coordinator, the scaler and the new machines. Check and take are one append."""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from actors.commands import Answer, Demand
from actors.decisions import scale
from actors.decisions.addresses import Lease
from actors.errors import Refused
from actors.ports import NewFact
from events import subjects
from events.allocator import AddressLeased
from events.backend import SlotTaken
from events.coordinator import GlobalSlotTaken
from events.demand import Placed
from events.envelope import Resources
from events.vm import Requested, SpawnStarted
from projections.allocator import AllocatorState
from projections.backend import BackendState
from projections.coordinator import CoordinatorState
from projections.demand import DemandState

COUNT_MOST = 100
"""Agents one demand may ask for: nine facts each at the most stay under the 1,000 of an atomic batch."""

BACKOFF_FIRST_S = 30.0
BACKOFF_MOST_S = 900.0
BACKOFF_REPEATED = 5
"""Launches that failed in a row defer the scaler for min(30 s * 2^(n-1), 900 s); wording changes at the fifth [3.11]."""


class ScalerRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says of one scaler, as far as decisions use it."""

    name: str
    backend: str
    slot: str  # the backend aggregate
    max_agents: int
    max_concurrent_spawns: int = 8
    max_cpus: float | None = None
    max_memory_bytes: int | None = None
    spawn_timeout_s: float = 300.0
    register_timeout_s: float = 300.0
    heartbeat_grace_s: float = 120.0
    beat_every_s: float = 10.0
    backoff_first_s: float = BACKOFF_FIRST_S
    backoff_most_s: float = BACKOFF_MOST_S
    targets: tuple[str, ...] = ()
    terms: scale.Terms | None = None  # of what its provisioners are offered; None: machines of this host
    label_sets: tuple[tuple[str, ...], ...] = ()  # declared, for people
    network: str = ""  # the allocator aggregate its machines' addresses come from; empty: none of ours


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """A demand with the label set it matched; `labels` are the declared ones, by which the driver knows what to start."""

    demand: Demand
    rules: ScalerRules
    labels: tuple[str, ...]
    agent_labels: tuple[str, ...]
    gate: tuple[str, ...]
    requests: Resources = Resources()
    limits: Resources = Resources()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that could be: its id and the driver's plan for it."""

    vm: str
    placement: dict[str, Any]
    lease: Lease | None = None
    code: str = ""  # the claim code of a cloud machine


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where machines of this coordinator live."""

    coordinator: str
    host: str
    boot_id: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The states the decision rests on; their sequences are what the append expects."""

    coordinator: CoordinatorState
    backend: BackendState
    allocator: AllocatorState = AllocatorState()
    demand: DemandState = DemandState()
    live: frozenset[str] = frozenset()  # machines of any scaler here whose life is not over
    turns: int = 0  # machines whose turn in the throttle has come with their request


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for each agent wanted, and the facts that make it true; no facts, nothing to append."""

    answers: tuple[Answer, ...]
    facts: tuple[NewFact, ...] = ()


def backoff_s(failures: int, first_s: float = BACKOFF_FIRST_S, most_s: float = BACKOFF_MOST_S) -> float:
    """Return how long a scaler is deferred after `failures` failed launches in a row; safe for any number."""
    return 0.0 if failures <= 0 else min(most_s, first_s * 2.0 ** min(failures - 1, 32))


def check_demand(demand: Demand) -> None:
    """Refuse a demand that can never be met as it is.

    Raises:
        Refused: `malformed`, naming the field and the accepted form.
    """
    if not 1 <= demand.count <= COUNT_MOST:
        raise Refused("malformed", f"count {demand.count}: ask for 1 to {COUNT_MOST} agents at once")
    if demand.job is not None and demand.count != 1:
        raise Refused("malformed", f"job {demand.job!r} with count {demand.count}: a job gets one agent")


def admit(
    routed: Routed, held: Held, places: tuple[Place | None, ...], site: Site, now: datetime
) -> Admission:
    """Admit as many of the agents wanted as the caps allow, in one batch.

    Refuses, in this order: an existing placement of the same job that lives; a closed gate; the scaler's
    backoff; global agents; scaler agents; scaler cpus and memory; addresses. Every refusal names the cap, the need and
    what is free. `places` has one entry per agent wanted, None where no address is left.
    """
    existing = _existing(routed, held)
    if existing is not None:
        return Admission(answers=(existing,))
    closed = _closed(routed.rules, held.backend, now)
    if closed is not None:
        return Admission(answers=(closed,) * len(places))
    taken = _Taken(routed, held)
    answers: list[Answer] = []
    granted: list[Place] = []
    for place in places:
        refusal = taken.refusal()
        if refusal is None and place is None:
            refusal = _no_address(routed.rules, held.allocator)
        if refusal is None:
            assert place is not None, "a machine without a place is refused"
            taken.take()
            granted.append(place)
            answers.append(
                Answer(kind="spawning", vm=place.vm, scaler=routed.rules.name, backend=routed.rules.backend)
            )
        else:
            answers.append(refusal)
    return Admission(answers=tuple(answers), facts=_facts(routed, held, tuple(granted), site, now))


def _existing(routed: Routed, held: Held) -> Answer | None:
    if routed.demand.job is None:
        return None
    for vm in held.demand.vms:
        if vm in held.live:
            return Answer(
                kind="existing",
                vm=vm,
                scaler=routed.rules.name,
                backend=routed.rules.backend,
                message=f"job {routed.demand.job} already has agent {vm}",
            )
    return None


def _no_address(rules: ScalerRules, allocator: AllocatorState) -> Answer:
    message = f"addresses: 1 needed, 0 free of {rules.network}, {len(allocator.leases)} leased; give it a wider cidr"
    return Answer(kind="at-capacity", scaler=rules.name, cap="addresses", message=message)


def _closed(rules: ScalerRules, backend: BackendState, now: datetime) -> Answer | None:
    if backend.gate != "open":
        message = f"scaler {rules.name} is {backend.gate}: `fleetlog scaler resume {rules.name}` opens it"
        return Answer(kind="refused", scaler=rules.name, message=message)
    if backend.failed_at is None:
        return None
    until = backend.failed_at + timedelta(
        seconds=backoff_s(backend.failures, rules.backoff_first_s, rules.backoff_most_s)
    )
    if now >= until:
        return None
    repeated = "repeatedly failing" if backend.failures >= BACKOFF_REPEATED else "backing off"
    wait_s = (until - now).total_seconds()
    message = (
        f"scaler {rules.name} is {repeated} after {backend.failures} failed launches, "
        f"again in {wait_s:.0f} s; last: {backend.last_failure}"
    )
    return Answer(kind="skipped", scaler=rules.name, message=message, retry_after_s=round(wait_s, 3))


class _Taken:
    """Counts while one demand's agents are admitted one after the other."""

    def __init__(self, routed: Routed, held: Held) -> None:
        self._routed = routed
        self._global_most = held.coordinator.global_max_agents
        self._global = len(held.coordinator.slots)
        self._agents = len(held.backend.slots)
        # Sums over all machines, so only where there is a limit.
        self._cpus = 0.0 if routed.rules.max_cpus is None else held.backend.cpus
        self._memory_bytes = 0 if routed.rules.max_memory_bytes is None else held.backend.memory_bytes

    def refusal(self) -> Answer | None:
        """Return the refusal of one more agent, or None when it fits."""
        rules, need = self._routed.rules, self._routed.requests
        checks = (
            ("global-agents", 1, self._global, self._global_most),
            ("scaler-agents", 1, self._agents, rules.max_agents),
            ("scaler-cpus", need.cpus, self._cpus, rules.max_cpus),
            ("scaler-memory-bytes", need.memory_bytes, self._memory_bytes, rules.max_memory_bytes),
        )
        for cap, wanted, used, most in checks:
            if most is not None and wanted and used + wanted > most:
                free = max(most - used, 0)
                message = f"{cap}: {wanted:g} needed, {free:g} free of {most:g} (scaler {rules.name})"
                return Answer(kind="at-capacity", scaler=rules.name, cap=cap, message=message)
        return None

    def take(self) -> None:
        """Count one more agent."""
        self._global += 1
        self._agents += 1
        self._cpus += self._routed.requests.cpus
        self._memory_bytes += self._routed.requests.memory_bytes


def _facts(
    routed: Routed, held: Held, granted: tuple[Place, ...], site: Site, now: datetime
) -> tuple[NewFact, ...]:
    facts: list[NewFact] = []
    coordinator = subjects.coordinator(site.coordinator)
    for number, place in enumerate(granted):
        facts.append(_next(facts, coordinator, held.coordinator, GlobalSlotTaken(vm=place.vm)))
        slot = SlotTaken(vm=place.vm, requests=routed.requests)
        facts.append(_next(facts, routed.rules.slot, held.backend, slot))
        if place.lease is not None:
            leased = AddressLeased(vm=place.vm, address=place.lease.address)
            facts.append(_next(facts, routed.rules.network, held.allocator, leased))
        vm, requested = subjects.vm(place.vm), _requested(routed, place, site)
        facts.append(NewFact(aggregate=vm, version=1, expected_sequence=0, event=requested))
        if number < held.turns:  # nobody waits: a second append would only make it later
            facts.append(NewFact(aggregate=vm, version=2, expected_sequence=None, event=SpawnStarted()))
            if routed.rules.terms is not None:
                facts += scale.offer(place.vm, requested, routed.rules.terms, place.code, now)
    if granted and routed.demand.job is not None:
        placed = Placed(
            labels=routed.demand.labels,
            vms=tuple(place.vm for place in granted),
            job=routed.demand.job,
            run=routed.demand.run,
        )
        facts.append(_next(facts, subjects.demand(routed.demand.id), held.demand, placed))
    return tuple(facts)


def _next(
    facts: list[NewFact],
    aggregate: str,
    held: CoordinatorState | BackendState | AllocatorState | DemandState,
    event: GlobalSlotTaken | SlotTaken | AddressLeased | Placed,
) -> NewFact:
    """Return the aggregate's next fact: only its first in the batch carries the expected sequence."""
    last = next(
        (fact for fact in reversed(facts) if fact.aggregate == aggregate), None
    )  # near the end, if any
    return NewFact(
        aggregate=aggregate,
        version=(held if last is None else last).version + 1,
        expected_sequence=held.sequence if last is None else None,
        event=event,
    )


def _requested(routed: Routed, place: Place, site: Site) -> Requested:
    rules, demand = routed.rules, routed.demand
    return Requested(
        scaler=rules.name,
        backend=rules.backend,
        slot=rules.slot,
        owner=site.coordinator,
        host=site.host,
        boot_id=site.boot_id,
        labels=routed.labels,
        agent_labels=routed.agent_labels,
        gate=routed.gate,
        demand=demand.id,
        job=demand.job,
        run=demand.run,
        requests=routed.requests,
        limits=routed.limits,
        targets=rules.targets,
        network=rules.network,
        address="" if place.lease is None else place.lease.address,
        placement=place.placement,
        spawn_timeout_s=rules.spawn_timeout_s,
        register_timeout_s=rules.register_timeout_s,
    )

"""The fleet as rows: agents, scalers, coordinators, demands and failures, all as of one sequence."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, get_args

import msgspec

from events.allocator import AllocatorEvent
from events.backend import BackendEvent
from events.claim import ClaimEvent
from events.coordinator import CoordinatorEvent, GlobalSlotTaken
from events.demand import DemandEvent, Placed
from events.envelope import Recorded
from events.scale import ScaleEvent
from events.vm import Failed, Reaped, VmEvent
from projections import allocator, coordinator, demand, failures, headroom, vm
from projections.allocator import AllocatorState
from projections.coordinator import CoordinatorState
from projections.failures import FailureRow
from projections.headroom import HeadroomRow
from projections.view import AnyTable, Key, RowSet, Table, unknown
from projections.vm import VmState


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's machine, dead ones included: what people filter on, and the whole state for the next boot."""

    id: str
    phase: str
    scaler: str
    backend: str
    slot: str
    owner: str
    host: str
    demand: str | None
    job: str | None
    run: str | None
    reason: str | None
    exit_code: int | None
    detail: str
    requested_at: datetime
    started_at: datetime | None
    spawned_at: datetime | None
    registered_at: datetime | None
    ended_at: datetime | None
    reaped_at: datetime | None
    changed_at: datetime
    version: int
    sequence: int
    state: VmState


class CoordinatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator id: the process that has it, and the rules that hold there."""

    id: str
    running: bool
    host: str
    boot_id: str
    pid: int
    starts: int
    digest: str
    global_max_agents: int
    scalers: dict[str, Any]
    version: int
    sequence: int
    changed_at: datetime


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live machine's place under the global cap of a coordinator."""

    vm: str
    coordinator: str


class DemandRow(msgspec.Struct, frozen=True, kw_only=True):
    """One demand and the machines its latest placement got."""

    id: str
    job: str | None
    run: str | None
    vms: tuple[str, ...]
    version: int
    sequence: int
    placed_at: datetime


class NetworkRow(msgspec.Struct, frozen=True, kw_only=True):
    """One network of one host: which machine holds which address."""

    aggregate: str
    leases: dict[str, str]
    version: int
    sequence: int


AGENTS = Table(name="agents", row_type=AgentRow)
HEADROOM = Table(name="headroom", row_type=HeadroomRow)
COORDINATORS = Table(name="coordinators", row_type=CoordinatorRow)
PLACES = Table(name="places", row_type=PlaceRow)
DEMANDS = Table(name="demands", row_type=DemandRow)
NETWORKS = Table(name="networks", row_type=NetworkRow)
FAILURES = Table(name="failures", row_type=FailureRow, insert_only=True)


class FleetView:
    """Everything about the present, and every failure; one checkpoint, so that its tables agree with each other."""

    name = "fleet"
    version = 1
    tables: tuple[AnyTable, ...] = (
        AGENTS,
        HEADROOM,
        COORDINATORS,
        PLACES,
        DEMANDS,
        NETWORKS,
        FAILURES,
    )

    def wants(self, fact: Recorded) -> Iterable[tuple[AnyTable, Key]]:
        """Return the rows that are one per machine or demand; the few others are loaded when met."""
        kind = type(fact.event)
        if kind in _VM:
            key = fact.aggregate.removeprefix("vm.")
            if kind is Reaped:
                return ((AGENTS, key), (PLACES, key))
            return ((AGENTS, key),)
        if kind in _DEMAND:
            return ((DEMANDS, fact.aggregate.removeprefix("demand.")),)
        return ()

    def apply(self, rows: RowSet, fact: Recorded) -> None:
        """Change the rows by one fact.

        Raises:
            BrokenLog: it does not follow the facts before it.
            UnknownFact: its tag is not known here.
        """
        fold = FOLDS.get(type(fact.event))
        if fold is None:
            raise unknown(fact)
        fold(rows, fact.event, fact)


def agent_row(state: VmState) -> AgentRow:
    """Return the row of a machine."""
    return AgentRow(
        id=state.id,
        phase=state.phase,
        scaler=state.scaler,
        backend=state.backend,
        slot=state.slot,
        owner=state.owner,
        host=state.host,
        demand=state.demand,
        job=state.job,
        run=state.run,
        reason=state.reason,
        exit_code=state.exit_code,
        detail=state.detail,
        requested_at=state.requested_at,
        started_at=state.started_at,
        spawned_at=state.spawned_at,
        registered_at=state.registered_at,
        ended_at=state.ended_at,
        reaped_at=state.reaped_at,
        changed_at=state.changed_at,
        version=state.version,
        sequence=state.sequence,
        state=state,
    )


def coordinator_state(row: CoordinatorRow, slots: frozenset[str]) -> CoordinatorState:
    """Return the actor's state of this coordinator, given who has a place under its global cap."""
    return CoordinatorState(
        version=row.version,
        sequence=row.sequence,
        running=row.running,
        host=row.host,
        boot_id=row.boot_id,
        pid=row.pid,
        starts=row.starts,
        digest=row.digest,
        global_max_agents=row.global_max_agents,
        scalers=row.scalers,
        slots=slots,
    )


def _apply_vm(rows: RowSet, event: VmEvent, fact: Recorded) -> None:
    key = fact.aggregate.removeprefix("vm.")
    row = rows.get(AGENTS, key)
    before = None if row is None else row.state
    after = vm.evolve(before, event, fact)
    rows.put(AGENTS, key, agent_row(after))
    if headroom.concerned(event):
        scaler = rows.get(HEADROOM, after.slot) or headroom.fresh(after.slot)
        rows.put(HEADROOM, after.slot, headroom.evolve_vm(scaler, before, after, event, fact))
    if isinstance(event, Failed):
        rows.put(FAILURES, fact.sequence, failures.failure(after, event, fact))
    elif isinstance(event, Reaped):
        if rows.get(PLACES, key) is not None:
            rows.put(PLACES, key, None)
        if after.network:
            _put_network(rows, after.network, allocator.evolve_vm(_network(rows, after.network), event, fact))


def _network(rows: RowSet, aggregate: str) -> AllocatorState:
    row = rows.get(NETWORKS, aggregate)
    if row is None:
        return AllocatorState()
    return AllocatorState(version=row.version, sequence=row.sequence, leases=row.leases)


def _put_network(rows: RowSet, aggregate: str, state: AllocatorState) -> None:
    row = NetworkRow(aggregate=aggregate, leases=state.leases, version=state.version, sequence=state.sequence)
    rows.put(NETWORKS, aggregate, row)


def _apply_allocator(rows: RowSet, event: AllocatorEvent, fact: Recorded) -> None:
    state = allocator.evolve(_network(rows, fact.aggregate), event, fact)
    _put_network(rows, fact.aggregate, state)


def _apply_backend(rows: RowSet, event: BackendEvent, fact: Recorded) -> None:
    row = rows.get(HEADROOM, fact.aggregate) or headroom.fresh(fact.aggregate)
    rows.put(HEADROOM, fact.aggregate, headroom.evolve(row, event, fact))


def _apply_coordinator(rows: RowSet, event: CoordinatorEvent, fact: Recorded) -> None:
    key = fact.aggregate.removeprefix("coordinator.")
    row = rows.get(COORDINATORS, key)
    before = CoordinatorState() if row is None else coordinator_state(row, frozenset())
    state = coordinator.evolve(before, event, fact)
    after = CoordinatorRow(
        id=key,
        running=state.running,
        host=state.host,
        boot_id=state.boot_id,
        pid=state.pid,
        starts=state.starts,
        digest=state.digest,
        global_max_agents=state.global_max_agents,
        scalers=state.scalers,
        version=state.version,
        sequence=state.sequence,
        changed_at=fact.at,
    )
    rows.put(COORDINATORS, key, after)
    if isinstance(event, GlobalSlotTaken):
        rows.put(PLACES, event.vm, PlaceRow(vm=event.vm, coordinator=key))


def _apply_demand(rows: RowSet, event: DemandEvent, fact: Recorded) -> None:
    key = fact.aggregate.removeprefix("demand.")
    row = rows.get(DEMANDS, key)
    before = (
        demand.DemandState()
        if row is None
        else demand.DemandState(
            version=row.version, sequence=row.sequence, job=row.job, run=row.run, vms=row.vms
        )
    )
    state = demand.evolve(before, event, fact)
    after = DemandRow(
        id=key,
        job=state.job,
        run=state.run,
        vms=state.vms,
        version=state.version,
        sequence=state.sequence,
        placed_at=fact.at,
    )
    rows.put(DEMANDS, key, after)


def _pass_by(_rows: RowSet, _event: object, _fact: Recorded) -> None:
    """Change nothing: what provisioners and claims do to a machine is in the machine's own facts."""


_VM = frozenset(get_args(VmEvent))
_DEMAND = frozenset({Placed})

FOLDS: dict[type, Callable[[RowSet, Any, Recorded], None]] = {
    **dict.fromkeys(get_args(VmEvent), _apply_vm),
    **dict.fromkeys(get_args(BackendEvent), _apply_backend),
    **dict.fromkeys(get_args(CoordinatorEvent), _apply_coordinator),
    AllocatorEvent: _apply_allocator,
    Placed: _apply_demand,
    **dict.fromkeys((*get_args(ClaimEvent), *get_args(ScaleEvent)), _pass_by),
}
"""Every event this view knows; a test holds it against every released one."""

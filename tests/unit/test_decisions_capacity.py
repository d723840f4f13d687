"""Who gets capacity: order of the caps, their messages, the batch that takes the slots, the backoff, the gate."""

from datetime import timedelta

import msgspec
import pytest

from actors.allocator import Turns
from actors.commands import Answer, Demand, SetGate
from actors.decisions.addresses import AddressPool, choose
from actors.decisions.backend import decide as decide_gate
from actors.decisions.capacity import (
    COUNT_MOST,
    Admission,
    Held,
    Place,
    Routed,
    ScalerRules,
    Site,
    admit,
    backoff_s,
    check_demand,
)
from actors.errors import Refused
from events.allocator import AddressLeased
from events.backend import DrainStarted, Paused, Resumed, SlotTaken
from events.coordinator import GlobalSlotTaken
from events.demand import Placed
from events.envelope import Resources
from events.vm import Reaped, Requested, Spawned, SpawnStarted, VmEvent
from projections.allocator import AllocatorState
from projections.backend import BackendState, Gate, Slot, evolve, evolve_vm
from projections.coordinator import CoordinatorState
from projections.demand import DemandState
from tests.given import AT, HANDLE, SLOT, recorded

GIB = 1 << 30
SITE = Site(coordinator="alpha", host="alpha-host", boot_id="boot-1")
RULES = ScalerRules(name="small", backend="bare-metal", slot=SLOT, max_agents=3, targets=("acme-infra",))


def routed(
    count: int = 1, *, job: str | None = None, rules: ScalerRules = RULES, need: Resources | None = None
) -> Routed:
    demand = Demand(id="d-1", labels=("small",), count=count, job=job, run="run-1" if job else None)
    return Routed(
        demand=demand,
        rules=rules,
        labels=("linux", "small"),
        agent_labels=("linux", "small", "x64"),
        gate=("gpu",),
        requests=need or Resources(),
        limits=Resources(cpus=2),
    )


def held(
    taken: int = 0,
    *,
    everywhere: int | None = None,
    most: int = 10,
    need: Resources | None = None,
    **backend: object,
) -> Held:
    """Hold `taken` slots of the scaler and `everywhere` of the coordinator (by default the same)."""
    slots = {f"t-{n}": Slot(vm=f"t-{n}", requests=need or Resources(), taken_at=AT) for n in range(taken)}
    counted = frozenset(f"t-{n}" for n in range(taken if everywhere is None else everywhere))
    return Held(
        coordinator=CoordinatorState(version=4, sequence=40, global_max_agents=most, slots=counted),
        backend=msgspec.structs.replace(BackendState(version=7, sequence=70, slots=slots), **backend),
    )


def ask(wanted: Routed, holding: Held) -> Admission:
    places = tuple(Place(vm=f"a-{n}", placement={"n": n}) for n in range(wanted.demand.count))
    return admit(wanted, holding, places, SITE, AT)


def kinds(admission: Admission) -> list[str]:
    return [answer.cap or answer.kind for answer in admission.answers]


def test_a_slot_is_taken_everywhere_in_one_batch_with_what_each_append_expects() -> None:
    admission = ask(routed(2), held())
    assert [(f.aggregate, f.version, f.expected_sequence, type(f.event)) for f in admission.facts] == [
        ("coordinator.alpha", 5, 40, GlobalSlotTaken),
        (SLOT, 8, 70, SlotTaken),
        ("vm.a-0", 1, 0, Requested),
        ("coordinator.alpha", 6, None, GlobalSlotTaken),
        (SLOT, 9, None, SlotTaken),
        ("vm.a-1", 1, 0, Requested),
    ]
    assert [(a.kind, a.vm, a.scaler, a.backend) for a in admission.answers] == [
        ("spawning", "a-0", "small", "bare-metal"),
        ("spawning", "a-1", "small", "bare-metal"),
    ]


def test_a_turn_that_is_free_comes_with_the_request() -> None:
    holding = msgspec.structs.replace(held(), turns=1)
    facts = [f for f in ask(routed(2), holding).facts if f.aggregate.startswith("vm.")]
    assert [(f.aggregate, f.version, f.expected_sequence, type(f.event)) for f in facts] == [
        ("vm.a-0", 1, 0, Requested),
        ("vm.a-0", 2, None, SpawnStarted),
        ("vm.a-1", 1, 0, Requested),
    ]


def test_a_turn_that_waits_for_no_one_is_given_to_a_granted_machine_only() -> None:
    holding = msgspec.structs.replace(held(2), turns=5)
    events = [type(f.event) for f in ask(routed(3), holding).facts]
    assert events.count(Requested) == events.count(SpawnStarted) == 1


def turns_of(**phases: str) -> Turns:
    slots = {
        vm: Slot(
            vm=vm,
            requests=Resources(),
            taken_at=AT,
            waiting=phase == "waiting",
            starting=phase == "starting",
        )
        for vm, phase in phases.items()
    }
    return Turns(BackendState(slots=slots))


def test_turns_are_what_the_throttle_leaves() -> None:
    assert turns_of().free(4) == 4
    assert turns_of(a="starting", b="running").free(4) == 3
    assert turns_of(a="starting", b="starting").free(1) == 0, "a width made smaller"


def test_nobody_gets_a_turn_past_one_that_waits() -> None:
    assert turns_of(a="waiting").free(4) == 0
    assert turns_of(a="waiting", b="running").free(4) == 0


def test_turns_follow_every_step_of_a_machine() -> None:
    state = BackendState()
    turns = Turns(state)
    taken = SlotTaken(vm="a", requests=Resources())
    state = evolve(state, taken, recorded(taken, 1, aggregate=SLOT, sequence=1))
    turns.note("a", state)
    assert turns.free(2) == 0
    steps: list[tuple[VmEvent, int]] = [
        (SpawnStarted(), 1),
        (Spawned(handle=HANDLE), 2),
        (Reaped(reason="job-complete", evidence="none", slot=SLOT), 2),
    ]
    for sequence, (event, free) in enumerate(steps, 2):
        fact = recorded(event, sequence, aggregate="vm.a", sequence=sequence)
        state = evolve_vm(state, event, fact)
        turns.note("a", state)
        assert turns.free(2) == free, event


def test_the_request_holds_all_that_teardown_will_need() -> None:
    requested = ask(routed(job="job-1", need=Resources(cpus=1)), held()).facts[2].event
    assert requested == Requested(
        scaler="small",
        backend="bare-metal",
        slot=SLOT,
        owner="alpha",
        host="alpha-host",
        boot_id="boot-1",
        labels=("linux", "small"),
        agent_labels=("linux", "small", "x64"),
        gate=("gpu",),
        demand="d-1",
        job="job-1",
        run="run-1",
        requests=Resources(cpus=1),
        limits=Resources(cpus=2),
        targets=("acme-infra",),
        placement={"n": 0},
    )


def test_a_demand_for_a_job_is_a_fact_of_its_own_and_one_without_is_not() -> None:
    fact = ask(routed(job="job-1"), held()).facts[-1]
    assert (fact.aggregate, fact.version, fact.expected_sequence) == ("demand.d-1", 1, 0)
    assert fact.event == Placed(labels=("small",), vms=("a-0",), job="job-1", run="run-1")
    assert len(ask(routed(), held()).facts) == 3


@pytest.mark.parametrize(
    ("holding", "wanted", "caps"),
    [
        (held(2), routed(3), ["spawning", "scaler-agents", "scaler-agents"]),
        (held(0, most=1), routed(3), ["spawning", "global-agents", "global-agents"]),
        (held(3, most=3), routed(), ["global-agents"]),  # both are reached: the coordinator's is told first
        (held(3, most=4), routed(), ["scaler-agents"]),
        (held(0, everywhere=10), routed(), ["global-agents"]),
        (held(9, most=5), routed(), ["global-agents"]),  # a cap that was lowered below what runs
    ],
)
def test_agents_are_admitted_up_to_each_cap_and_never_past_it(
    holding: Held, wanted: Routed, caps: list[str]
) -> None:
    assert kinds(ask(wanted, holding)) == caps


def test_nothing_is_written_for_what_is_refused() -> None:
    assert ask(routed(3), held(3)).facts == ()
    assert sum(isinstance(f.event, Requested) for f in ask(routed(3), held(2)).facts) == 1


def _resources(**caps: object) -> ScalerRules:
    return msgspec.structs.replace(RULES, max_agents=50, **caps)


def test_cpus_are_reserved_by_request_and_told_in_their_unit() -> None:
    need = Resources(cpus=1.5)
    rules = _resources(max_cpus=4.0)
    admission = ask(routed(3, rules=rules, need=need), held(1, need=Resources(cpus=0.5)))
    assert kinds(admission) == ["spawning", "spawning", "scaler-cpus"]
    assert admission.answers[2].message == "scaler-cpus: 1.5 needed, 0.5 free of 4 (scaler small)"


def test_memory_is_reserved_by_request() -> None:
    rules = _resources(max_memory_bytes=4 * GIB)
    admission = ask(
        routed(3, rules=rules, need=Resources(memory_bytes=GIB)),
        held(1, need=Resources(memory_bytes=2 * GIB)),
    )
    assert kinds(admission) == ["spawning", "spawning", "scaler-memory-bytes"]


def test_cpus_are_told_before_memory_when_neither_fits() -> None:
    rules = _resources(max_cpus=1.0, max_memory_bytes=GIB)
    wanted = routed(rules=rules, need=Resources(cpus=2, memory_bytes=2 * GIB))
    assert kinds(ask(wanted, held())) == ["scaler-cpus"]


def test_an_agent_that_declares_nothing_passes_a_full_resource_cap_and_still_takes_a_slot() -> None:
    rules = _resources(max_cpus=1.0)
    admission = ask(routed(rules=rules), held(1, need=Resources(cpus=1)))
    assert kinds(admission) == ["spawning"]
    assert admission.facts[1].event == SlotTaken(vm="a-0", requests=Resources())


def test_a_cap_that_is_not_set_refuses_nothing() -> None:
    wanted = routed(rules=_resources(), need=Resources(cpus=1e6, memory_bytes=1 << 60))
    assert kinds(ask(wanted, held())) == ["spawning"]


def test_a_refusal_by_a_cap_names_cap_need_and_what_is_free() -> None:
    answer = ask(routed(), held(3)).answers[0]
    assert answer == Answer(
        kind="at-capacity",
        scaler="small",
        cap="scaler-agents",
        message="scaler-agents: 1 needed, 0 free of 3 (scaler small)",
    )


def test_free_is_never_below_zero() -> None:
    assert "0 free of 3" in ask(routed(), held(9)).answers[0].message


def test_the_same_job_gets_its_living_agent_back_even_where_nothing_else_is_admitted() -> None:
    placed = DemandState(version=1, sequence=9, job="job-1", vms=("a-9",))
    full = msgspec.structs.replace(held(3, gate="paused"), demand=placed, live=frozenset({"a-9"}))
    admission = ask(routed(job="job-1"), full)
    assert [(a.kind, a.vm) for a in admission.answers] == [("existing", "a-9")]
    assert admission.facts == ()


def test_a_job_whose_agent_is_over_gets_another_one_as_the_demand_s_next_version() -> None:
    placed = DemandState(version=1, sequence=9, job="job-1", vms=("a-9",))
    fact = ask(routed(job="job-1"), msgspec.structs.replace(held(), demand=placed)).facts[-1]
    assert (fact.aggregate, fact.version, fact.expected_sequence) == ("demand.d-1", 2, 9)


NETWORK = "allocator.alpha-host.default"
POOL = AddressPool(aggregate=NETWORK, cidr="10.0.0.0/29", gateway="10.0.0.1", bridge="flt-br0")


def _with_addresses(places: tuple[Place | None, ...], holding: Held) -> Admission:
    rules = msgspec.structs.replace(RULES, network=NETWORK)
    leases = AllocatorState(version=2, sequence=20, leases={"10.0.0.1": "t-8"})
    holding = msgspec.structs.replace(holding, allocator=leases)
    return admit(routed(len(places), rules=rules), holding, places, SITE, AT)


def test_an_address_is_leased_in_the_batch_that_requests_its_machine() -> None:
    place = Place(vm="a-0", placement={}, lease=choose(POOL, AllocatorState(), frozenset({"10.0.0.2"})))
    facts = _with_addresses((place,), held()).facts
    assert [fact.aggregate for fact in facts] == ["coordinator.alpha", SLOT, NETWORK, "vm.a-0"]
    assert (facts[2].version, facts[2].expected_sequence) == (3, 20)
    assert facts[2].event == AddressLeased(vm="a-0", address="10.0.0.3")
    requested = facts[3].event
    assert isinstance(requested, Requested)
    assert (requested.network, requested.address) == (NETWORK, "10.0.0.3")


def test_where_no_address_is_left_the_network_is_named_after_every_other_cap() -> None:
    answer = _with_addresses((None,), held()).answers[0]
    assert (answer.kind, answer.cap) == ("at-capacity", "addresses")
    assert answer.message.startswith(f"addresses: 1 needed, 0 free of {NETWORK}")
    assert kinds(_with_addresses((None,), held(3))) == ["scaler-agents"]
    assert _with_addresses((None,), held()).facts == ()


@pytest.mark.parametrize("gate", ["paused", "draining"])
def test_a_closed_gate_refuses_every_agent_before_any_cap_and_names_the_way_out(gate: Gate) -> None:
    answers = ask(routed(2), held(3, gate=gate, failures=3, failed_at=AT)).answers
    assert [answer.kind for answer in answers] == ["refused", "refused"]
    assert answers[0].message == f"scaler small is {gate}: `fleetlog scaler resume small` opens it"


def test_the_backoff_doubles_up_to_its_most() -> None:
    waits = [backoff_s(n) for n in (1, 2, 3, 4, 5, 6, 7, 2000)]
    assert waits == [30, 60, 120, 240, 480, 900, 900, 900]
    assert backoff_s(0) == 0
    assert backoff_s(3, first_s=1, most_s=3) == 3


def _failing(failures: int, ago_s: float) -> Held:
    failed_at = AT - timedelta(seconds=ago_s)
    return held(3, failures=failures, failed_at=failed_at, last_failure="no such file: runner")


def test_a_failing_scaler_is_skipped_before_any_cap_and_says_when_to_come_again() -> None:
    (answer,) = ask(routed(), _failing(2, ago_s=20)).answers
    assert (answer.kind, answer.retry_after_s) == ("skipped", 40)
    assert answer.message == (
        "scaler small is backing off after 2 failed launches, again in 40 s; last: no such file: runner"
    )


def test_the_backoff_is_over_to_the_second() -> None:
    assert ask(routed(), _failing(1, ago_s=29.999)).answers[0].kind == "skipped"
    assert ask(routed(), _failing(1, ago_s=30)).answers[0].kind == "at-capacity"


@pytest.mark.parametrize(("failures", "wording"), [(4, "is backing off"), (5, "is repeatedly failing")])
def test_from_the_fifth_failure_in_a_row_the_wording_says_repeatedly(failures: int, wording: str) -> None:
    assert wording in ask(routed(), _failing(failures, ago_s=0)).answers[0].message


@pytest.mark.parametrize("count", [0, -1, COUNT_MOST + 1])
def test_a_count_out_of_bounds_is_refused_with_the_bounds(count: int) -> None:
    with pytest.raises(Refused, match=f"ask for 1 to {COUNT_MOST}") as refusal:
        check_demand(Demand(id="d", labels=(), count=count))
    assert refusal.value.code == "malformed"


def test_a_job_gets_one_agent() -> None:
    with pytest.raises(Refused, match="a job gets one agent"):
        check_demand(Demand(id="d", labels=(), count=2, job="job-1"))
    check_demand(Demand(id="d", labels=(), count=1, job="job-1"))
    check_demand(Demand(id="d", labels=(), count=COUNT_MOST))


def test_the_largest_demand_stays_within_one_atomic_batch() -> None:
    rules = msgspec.structs.replace(RULES, max_agents=1000)
    holding = msgspec.structs.replace(held(most=1000), turns=1000)
    assert COUNT_MOST * 4 <= len(ask(routed(COUNT_MOST, rules=rules), holding).facts) <= 1000


@pytest.mark.parametrize(
    ("before", "asked", "facts"),
    [
        ("open", "paused", (Paused(by="anna"),)),
        ("open", "draining", (DrainStarted(by="anna"),)),
        ("open", "open", ()),
        ("paused", "paused", ()),
        ("paused", "draining", (DrainStarted(by="anna"),)),
        ("paused", "open", (Resumed(by="anna"),)),
        ("draining", "paused", (Paused(by="anna"),)),
        ("draining", "draining", ()),
        ("draining", "open", (Resumed(by="anna"),)),
    ],
)
def test_a_gate_that_stands_so_already_is_no_fact(
    before: Gate, asked: Gate, facts: tuple[object, ...]
) -> None:
    command = SetGate(scaler="small", gate=asked, by="anna")
    assert decide_gate(BackendState(gate=before), command) == facts

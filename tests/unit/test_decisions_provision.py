"""What a provisioner's words come to in every phase, with one target and with two; and what targets are told."""

from datetime import timedelta

import msgspec
import pytest

from actors.commands import RegisterAgent, ReportProvision, Verdict
from actors.decisions import scale
from actors.decisions.scale import Last, Terms, claim_digest
from actors.decisions.vm import End, decide
from actors.errors import Refused
from events.envelope import Resources
from events.scale import Down, Up
from events.vm import Draining, Failed, Handle, SpawnStarted, TeardownConfirmed, VmEvent
from projections.vm import Phase, VmState, evolve
from tests.given import AT, HISTORIES, PHASES, SESSION, VM, life, recorded

TERMS = Terms(
    cluster="default", nats_url="tls://nats.example.com:4222", claim_ttl_s=300, teardown_timeout_s=600
)
ACCEPTED = Handle(driver="event", version=1, data={"target": "one", "reference": "i-1"})
CODE = "ab" * 32


def machine(phase: Phase, *targets: str) -> VmState:
    state = life(HISTORIES[phase])
    handle = None if state.handle is None else ACCEPTED
    return msgspec.structs.replace(state, backend="event", targets=targets, handle=handle)


def says(verdict: Verdict, target: str = "one", *, permanent: bool = False) -> ReportProvision:
    return ReportProvision(
        vm=VM, target=target, verdict=verdict, reference="i-1", detail="words", permanent=permanent
    )


def tags(events: tuple[VmEvent, ...]) -> str:
    return " ".join(str(event.__struct_config__.tag).removeprefix("vm.") for event in events)


ONE: dict[str, dict[Phase, str]] = {
    "accepted": {"starting": "spawned"},
    "failed": {"starting": "failed", "spawned": "failed"},
    "terminated": {
        "starting": "failed reaped",
        "spawned": "failed reaped",
        "registered": "failed reaped",
        "draining": "reaped",
        "failed": "reaped",
    },
}
TWO: dict[str, dict[Phase, str]] = {
    "accepted": {"starting": "spawned"},
    "failed": {"spawned": "failed"},  # while it starts the other one may still bring it up
    "terminated": {
        "spawned": "failed teardown_confirmed",
        "registered": "failed teardown_confirmed",
        "draining": "teardown_confirmed",
        "failed": "teardown_confirmed",
    },
}
OTHER: dict[str, dict[Phase, str]] = {
    "accepted": {"starting": "spawned"},
    "failed": {},  # it was the first that accepted
    "terminated": {"draining": "teardown_confirmed", "failed": "teardown_confirmed"},
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("verdict", ["accepted", "failed", "terminated"])
def test_every_word_in_every_phase_comes_to_what_the_tables_say(verdict: Verdict, phase: Phase) -> None:
    assert tags(decide(machine(phase, "one"), says(verdict))) == ONE[verdict].get(phase, "")
    both = machine(phase, "one", "two")
    assert tags(decide(both, says(verdict))) == TWO[verdict].get(phase, "")
    assert tags(decide(both, says(verdict, "two"))) == OTHER[verdict].get(phase, "")
    with pytest.raises(Refused) as refused:
        decide(both, says(verdict, "three"))
    assert refused.value.code == "not-yours"


@pytest.mark.parametrize(("permanent", "reason"), [(True, "launch-refused"), (False, "launch-failed")])
def test_a_failure_says_whose_and_whether_it_may_work_another_time(*, permanent: bool, reason: str) -> None:
    events = decide(machine("starting", "one"), says("failed", permanent=permanent))
    assert events == (Failed(reason=reason, detail="one: words"),)  # type: ignore[arg-type]


def test_the_last_target_to_confirm_reaps_and_a_repeat_does_nothing() -> None:
    state = machine("draining", "one", "two")
    confirmed = TeardownConfirmed(target="one", evidence="words")
    state = evolve(state, confirmed, recorded(confirmed, state.version + 1))
    assert decide(state, says("terminated")) == ()
    assert tags(decide(state, says("terminated", "two"))) == "teardown_confirmed reaped"


def test_an_agent_that_registers_first_is_let_in_by_event_scalers_alone() -> None:
    register = RegisterAgent(vm=VM, session=SESSION)
    assert tags(decide(machine("starting", "one"), register)) == "spawned registered"
    with pytest.raises(Refused):
        decide(life(HISTORIES["starting"]), register)


def test_an_offer_tells_every_target_and_registers_the_hash_of_one_code() -> None:
    state = msgspec.structs.replace(
        machine("requested", "one", "two"), gate=("gpu",), job="job-1", requests=Resources(cpus=1)
    )
    claim, *ups = scale.offer(VM, state, TERMS, CODE, AT)
    assert claim.aggregate == f"claim.{claim_digest(CODE)}"
    assert [fact.aggregate for fact in ups] == [f"scale.up.{t}.small.{VM}" for t in ("one", "two")]
    assert all((fact.version, fact.expected_sequence) == (1, 0) for fact in (claim, *ups))
    first = ups[0].event
    assert isinstance(first, Up)
    assert (first.claim_code, first.mandatory_labels, first.job) == (CODE, ("gpu",), "job-1")
    assert first.resources == Resources(cpus=1), "what is requested, where there is no limit"
    assert first.answer_by - AT == timedelta(seconds=state.spawn_timeout_s)
    assert first.claim_expires_at - AT == timedelta(seconds=300)


def told(state: VmState, *events: VmEvent) -> list[tuple[str, Down]]:
    facts = scale.withdraw(state, events, TERMS, AT)
    return [(fact.aggregate, fact.event) for fact in facts if isinstance(fact.event, Down)]


def test_who_was_asked_is_told_of_the_end_and_who_said_it_is_not() -> None:
    state = machine("spawned", "one", "two")
    ended = decide(state, End(reason="drain", detail=""))
    assert [aggregate for aggregate, _ in told(state, *ended)] == [
        f"scale.down.{target}.small.{VM}" for target in ("one", "two")
    ]
    assert [down.reference for _, down in told(state, *ended)] == ["i-1", ""], "of the one that accepted"
    gone = decide(state, says("terminated"))
    assert [down.target for _, down in told(state, *gone)] == ["two"]


@pytest.mark.parametrize("phase", ["requested", "draining", "failed", "reaped"])
def test_nobody_is_told_of_an_end_that_was_told_already_or_of_a_start_that_was_not(phase: Phase) -> None:
    assert told(machine(phase, "one"), Draining(reason="drain")) == []


def test_nothing_that_ends_no_life_is_told() -> None:
    assert told(machine("requested", "one"), SpawnStarted()) == []


def test_an_end_is_offered_again_after_the_last_offer_to_those_who_have_not_confirmed() -> None:
    state = msgspec.structs.replace(machine("draining", "one", "two"), confirmed=("one",))
    (fact,) = scale.withdraw_again(state, {"two": Last(3, 77)}, TERMS, AT)
    assert (fact.version, fact.expected_sequence) == (4, 77)
    assert isinstance(fact.event, Down)
    assert (fact.event.offer, fact.event.request_id) == (4, f"{VM}.down")


def test_the_answer_to_an_end_is_due_after_the_timeout_or_the_last_retry() -> None:
    state = machine("draining", "one")
    assert state.ended_at is not None
    assert scale.answer_by(state, TERMS) == state.ended_at + timedelta(seconds=600)
    again = msgspec.structs.replace(state, teardown_retry_at=AT)
    assert scale.answer_by(again, TERMS) == AT

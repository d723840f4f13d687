"""One machine: what every command comes to in every phase, and what the facts say."""

from datetime import timedelta
from typing import get_args

import msgspec
import pytest

from actors.commands import AgentDone, RegisterAgent, RemoveAgent, ReportProvision
from actors.decisions.vm import (
    DETAIL_CHARACTERS,
    End,
    NoteConfigAcked,
    NoteDeadline,
    NoteExit,
    NoteGone,
    NoteSilence,
    NoteSpawned,
    NoteSpawnFailed,
    NoteTeardownFailed,
    NoteTornDown,
    NoteUnanswered,
    StartSpawn,
    TakeUp,
    VmCommand,
    decide,
    teardown_retry_s,
)
from actors.errors import DriverError, Refused
from events.vm import (
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Registered,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownFailed,
    VmEvent,
)
from projections.vm import BrokenLog, Phase, evolve
from tests.given import (
    AT,
    HANDLE,
    HISTORIES,
    PHASES,
    REQUESTED,
    SESSION,
    SLOT,
    VM,
    Given,
    given,
    life,
    recorded,
)

COMMANDS: dict[str, VmCommand] = {
    "turn comes": StartSpawn(),
    "driver brought it up": NoteSpawned(handle=HANDLE),
    "driver failed": NoteSpawnFailed(kind="timeout", detail="no answer", transient=True),
    "deadline long past": NoteDeadline(now=AT + timedelta(hours=1)),
    "deadline not yet": NoteDeadline(now=AT),
    "agent registers": RegisterAgent(vm=VM, session=SESSION),
    "another registers": RegisterAgent(vm=VM, session="session-2"),
    "config acked": NoteConfigAcked(session=SESSION),
    "another acks": NoteConfigAcked(session="session-2"),
    "agent done": AgentDone(vm=VM, session=SESSION, exit_code=0),
    "another says done": AgentDone(vm=VM, session="session-2", exit_code=0),
    "it exits": NoteExit(exit_code=1),
    "it is silent": NoteSilence(silent_s=130.04, grace_s=120),
    "it is gone": NoteGone(reason="exited", detail="no process"),
    "it is found running": TakeUp(coordinator="alpha", handle=HANDLE, evidence="pid 42"),
    "scaler drains": End(reason="drain", detail="scaler small is draining"),
    "supervision gives up": End(reason="supervision", detail="died 4 times", failed=True),
    "removed": RemoveAgent(vm=VM, by="anna"),
    "removed with force": RemoveAgent(vm=VM, by="anna", force=True),
    "torn down": NoteTornDown(evidence="nothing left"),
    "teardown failed": NoteTeardownFailed(detail="busy"),
    "nobody confirms its end": NoteUnanswered(detail="not confirmed", offered={}, retry_in_s=600),
    "a provisioner speaks": ReportProvision(vm=VM, target="acme-infra", verdict="terminated"),
}

_NO: dict[Phase, str] = dict.fromkeys(PHASES, "")

TABLE: dict[str, dict[Phase, str]] = {
    "turn comes": {**_NO, "requested": "vm.spawn_started"},
    "driver brought it up": {**_NO, "starting": "vm.spawned"},
    "driver failed": {**_NO, "starting": "vm.failed"},
    "deadline long past": {**_NO, "starting": "vm.failed", "spawned": "vm.failed"},
    "deadline not yet": _NO,
    "agent registers": {
        "requested": "refused not-started",
        "starting": "refused not-started",
        "spawned": "vm.registered",
        "registered": "",  # the same session again: its reply was lost
        "draining": "refused ended",
        "failed": "refused ended",
        "reaped": "refused ended",
    },
    "another registers": {
        "requested": "refused not-started",
        "starting": "refused not-started",
        "spawned": "vm.registered",
        "registered": "refused already-registered",
        "draining": "refused ended",
        "failed": "refused ended",
        "reaped": "refused ended",
    },
    "config acked": {**_NO, "registered": "vm.config_acked"},
    "another acks": _NO,
    "agent done": {
        "requested": "refused not-registered",
        "starting": "refused not-registered",
        "spawned": "refused not-registered",
        "registered": "vm.draining",
        "draining": "",
        "failed": "refused not-registered",  # in this history it failed before it registered
        "reaped": "",
    },
    "another says done": dict.fromkeys(PHASES, "refused not-registered"),
    "it exits": {**_NO, "starting": "vm.failed", "spawned": "vm.failed", "registered": "vm.failed"},
    "it is silent": {**_NO, "registered": "vm.failed"},
    "it is gone": {
        **_NO,
        "requested": "vm.failed",
        "starting": "vm.failed",
        "spawned": "vm.failed",
        "registered": "vm.failed",
    },
    "it is found running": {
        **_NO,
        "starting": "vm.spawned vm.taken_up",
        "spawned": "vm.taken_up",
        "registered": "vm.taken_up",
    },
    "scaler drains": {
        **_NO,
        "requested": "vm.draining",
        "starting": "vm.draining",
        "spawned": "vm.draining",
        "registered": "vm.draining",
    },
    "supervision gives up": {
        **_NO,
        "requested": "vm.failed",
        "starting": "vm.failed",
        "spawned": "vm.failed",
        "registered": "vm.failed",
    },
    "removed": {
        "requested": "vm.condemned vm.draining",
        "starting": "vm.condemned vm.draining",
        "spawned": "vm.condemned vm.draining",
        "registered": "refused busy",
        "draining": "",
        "failed": "",
        "reaped": "refused ended",
    },
    "removed with force": {
        "requested": "vm.condemned vm.draining",
        "starting": "vm.condemned vm.draining",
        "spawned": "vm.condemned vm.draining",
        "registered": "vm.condemned vm.draining",
        "draining": "",
        "failed": "",
        "reaped": "refused ended",
    },
    "torn down": {**_NO, "draining": "vm.reaped", "failed": "vm.reaped"},
    "teardown failed": {**_NO, "draining": "vm.teardown_failed", "failed": "vm.teardown_failed"},
    "nobody confirms its end": {**_NO, "draining": "vm.teardown_failed", "failed": "vm.teardown_failed"},
    "a provisioner speaks": dict.fromkeys(
        PHASES, "refused not-yours"
    ),  # of a machine that no target was offered
}
"""What every command comes to in every phase: tags in order, `refused CODE`, or nothing."""


def _outcome(phase: Phase, command: VmCommand) -> str:
    try:
        events = decide(life(HISTORIES[phase]), command)
    except Refused as refused:
        return f"refused {refused.code}"
    return " ".join(str(event.__struct_config__.tag) for event in events)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_every_phase_comes_to_what_the_table_says(name: str, phase: Phase) -> None:
    assert _outcome(phase, COMMANDS[name]) == TABLE[name][phase]


def test_the_table_has_every_kind_of_command_in_every_phase() -> None:
    assert {type(command) for command in COMMANDS.values()} == set(get_args(VmCommand))
    assert set(TABLE) == set(COMMANDS)
    assert all(set(row) == set(PHASES) for row in TABLE.values())
    assert all(life(HISTORIES[phase]).phase == phase for phase in PHASES)


def test_reaped_follows_only_where_a_teardown_is_owed() -> None:
    """A machine that may run must not free its slot."""
    phases = {phase for row in TABLE.values() for phase, outcome in row.items() if "vm.reaped" in outcome}
    assert phases == {"draining", "failed"}


def test_a_spawned_machine_carries_the_handle_it_is_found_by() -> None:
    given("starting").when(NoteSpawned(handle=HANDLE)).then(Spawned(handle=HANDLE))


@pytest.mark.parametrize(("transient", "reason"), [(True, "launch-failed"), (False, "launch-refused")])
def test_a_failed_launch_says_whether_it_may_work_another_time(*, transient: bool, reason: str) -> None:
    error = DriverError("missing", "no such file: runner", transient=transient)
    given("starting").when(NoteSpawnFailed.of(error)).then(
        Failed(reason=reason, detail="missing: no such file: runner")  # type: ignore[arg-type]
    )


def test_the_spawn_deadline_counts_from_its_turn_and_is_met_to_the_second() -> None:
    """A wait in the throttle must not be held against the spawn; `spawn_started` is one second after version 1."""
    started = AT + timedelta(seconds=2)
    late = NoteDeadline(now=started + timedelta(seconds=60))
    given("starting").when(NoteDeadline(now=started + timedelta(seconds=59.999))).then_nothing()
    given("starting").when(late).then(Failed(reason="spawn-timeout", detail="not up within 60 s"))


def test_the_registration_deadline_counts_from_the_machine_s_start() -> None:
    up = AT + timedelta(seconds=3)
    late = NoteDeadline(now=up + timedelta(seconds=120))
    given("spawned").when(NoteDeadline(now=up + timedelta(seconds=119.999))).then_nothing()
    given("spawned").when(late).then(
        Failed(reason="register-timeout", detail="no agent registered within 120 s")
    )


def test_a_machine_that_waits_for_its_turn_has_no_deadline() -> None:
    given("requested").when(NoteDeadline(now=AT + timedelta(days=9))).then_nothing()


def test_the_registration_keeps_what_the_agent_says_of_itself_within_bounds() -> None:
    command = RegisterAgent(vm=VM, session="s", agent_version="v" * 100, facts={"os": "linux"})
    given("spawned").when(command).then(
        Registered(session="s", agent_version="v" * 64, facts={"os": "linux"})
    )


def test_a_second_session_is_told_that_an_id_is_used_once() -> None:
    when = given("registered").when(RegisterAgent(vm=VM, session="another"))
    when.then_refused("already-registered", saying="another session: an id is used once")


@pytest.mark.parametrize("phase", ["draining", "failed", "reaped"])
def test_an_agent_of_a_machine_that_ended_is_told_how_it_ended(phase: Phase) -> None:
    reason = "exited-early" if phase == "failed" else "job-complete"
    when = given(phase).when(RegisterAgent(vm=VM, session=SESSION))
    when.then_refused("ended", saying=rf"{phase} \({reason}\): its one life is over")


def test_a_configuration_is_acknowledged_once() -> None:
    given("registered").when(NoteConfigAcked(session=SESSION)).then(ConfigAcked())
    acked = Given(*HISTORIES["registered"], ConfigAcked())
    acked.when(NoteConfigAcked(session=SESSION)).then_nothing()


def test_done_ends_the_life_with_the_job_s_exit_code() -> None:
    command = AgentDone(vm=VM, session=SESSION, exit_code=7, detail="job left with 7")
    given("registered").when(command).then(
        Draining(reason="job-complete", detail="job left with 7", exit_code=7)
    )


def test_done_after_a_failure_of_a_registered_agent_is_too_late_and_no_refusal() -> None:
    failed = Given(*HISTORIES["registered"], Failed(reason="heartbeat-timeout", detail="no beat"))
    failed.when(AgentDone(vm=VM, session=SESSION, exit_code=0)).then_nothing()


@pytest.mark.parametrize(
    ("phase", "reason"), [("starting", "exited-early"), ("spawned", "exited-early"), ("registered", "exited")]
)
def test_an_exit_before_and_after_the_registration_are_told_apart(phase: Phase, reason: str) -> None:
    given(phase).when(NoteExit(exit_code=-9)).then(
        Failed(reason=reason, detail="ended with exit code -9", exit_code=-9)  # type: ignore[arg-type]
    )


def test_an_exit_code_nobody_could_collect_is_none_and_never_a_guess() -> None:
    given("registered").when(NoteExit(exit_code=None)).then(
        Failed(reason="exited", detail="ended with exit code unknown", exit_code=None)
    )


def test_silence_says_how_long_it_was_and_what_the_grace_is() -> None:
    given("registered").when(NoteSilence(silent_s=130.04, grace_s=120)).then(
        Failed(reason="heartbeat-timeout", detail="no beat for 130.0 s, grace 120 s")
    )


def test_a_machine_found_before_its_start_was_recorded_is_recorded_and_taken_up_in_one_decision() -> None:
    """The crash came between the spawn and its fact: another spawn would make a second machine."""
    command = TakeUp(coordinator="alpha", handle=HANDLE, evidence="pid 42 since 9")
    given("starting").when(command).then(
        Spawned(handle=HANDLE), TakenUp(coordinator="alpha", evidence="pid 42 since 9")
    )


def test_a_machine_found_running_keeps_the_handle_of_the_log() -> None:
    other = Handle(driver="bare-metal", version=1, data={"pid": 43})
    given("spawned").when(TakeUp(coordinator="alpha", handle=other, evidence="pid 43")).then(
        TakenUp(coordinator="alpha", evidence="pid 43")
    )


def test_a_removal_writes_who_asked_before_the_end() -> None:
    given("registered").when(RemoveAgent(vm=VM, by="anna", force=True)).then(
        Condemned(reason="operator", evidence="asked by anna with force"),
        Draining(reason="operator", detail="removed by anna"),
    )


def test_a_busy_agent_is_removed_only_with_force_and_says_so() -> None:
    given("registered").when(RemoveAgent(vm=VM, by="anna")).then_refused("busy", saying="use --force")


def test_the_last_fact_says_why_the_life_ended_and_which_slot_is_free() -> None:
    given("failed").when(NoteTornDown(evidence="cgroup gone")).then(
        Reaped(reason="exited-early", slot=SLOT, evidence="cgroup gone")
    )


def test_a_failed_teardown_is_counted_and_tried_again_later_each_time() -> None:
    events: tuple[VmEvent, ...] = HISTORIES["draining"]
    waits = []
    for tries in range(1, 9):
        (failed,) = decide(life(events), NoteTeardownFailed(detail="busy"))
        assert isinstance(failed, TeardownFailed)
        assert failed.tries == tries
        waits.append(failed.retry_in_s)
        events = (*events, failed)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_wait_for_the_next_teardown_is_safe_for_any_number() -> None:
    assert teardown_retry_s(100_000) == 60
    assert teardown_retry_s(0) <= 1


def test_a_teardown_succeeds_after_any_number_of_failures() -> None:
    again = Given(
        *HISTORIES["failed"], *(TeardownFailed(detail="busy", tries=n, retry_in_s=1) for n in (1, 2))
    )
    again.when(NoteTornDown(evidence="gone")).then(Reaped(reason="exited-early", slot=SLOT, evidence="gone"))


LONG = "ü" * (DETAIL_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("phase", "command", "field"),
    [
        ("starting", NoteSpawnFailed(kind="unknown", detail=LONG, transient=True), "detail"),
        ("registered", AgentDone(vm=VM, session=SESSION, exit_code=0, detail=LONG), "detail"),
        ("registered", NoteExit(exit_code=1, detail=LONG), "detail"),
        ("registered", NoteGone(reason="exited", detail=LONG), "detail"),
        ("registered", TakeUp(coordinator="alpha", handle=None, evidence=LONG), "evidence"),
        ("registered", End(reason="drain", detail=LONG), "detail"),
        ("draining", NoteTornDown(evidence=LONG), "evidence"),
        ("draining", NoteTeardownFailed(detail=LONG), "detail"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else str(value)[:10],
)
def test_a_fact_keeps_only_so_much_of_a_text_from_outside(
    phase: Phase, command: VmCommand, field: str
) -> None:
    (event,) = decide(life(HISTORIES[phase]), command)
    text = getattr(event, field)
    assert len(text) == DETAIL_CHARACTERS
    assert text.endswith("…")


def test_a_text_of_exactly_the_limit_is_kept_whole() -> None:
    text = "x" * DETAIL_CHARACTERS
    given("registered").when(End(reason="drain", detail=text)).then(Draining(reason="drain", detail=text))


def test_a_decision_is_about_the_state_alone_and_changes_nothing_in_it() -> None:
    state = life(HISTORIES["registered"])
    before = msgspec.json.encode(state)
    for command in COMMANDS.values():
        try:
            once = decide(state, command)
        except Refused:
            continue
        assert decide(state, command) == once
    assert msgspec.json.encode(state) == before


def test_a_version_that_is_not_the_next_is_a_broken_log() -> None:
    state = life(HISTORIES["requested"])
    with pytest.raises(BrokenLog, match="follows version 1"):
        evolve(state, SpawnStarted(), recorded(SpawnStarted(), 3))
    with pytest.raises(BrokenLog, match="a second time"):
        evolve(state, REQUESTED, recorded(REQUESTED, 2))
    with pytest.raises(BrokenLog, match=r"begins with vm\.requested"):
        evolve(None, SpawnStarted(), recorded(SpawnStarted(), 1))

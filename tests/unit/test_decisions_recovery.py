"""After a restart: every cell of log times host, each with its reason, and a host that booted anew."""

from typing import get_args

import msgspec
import pytest

from actors.decisions.recovery import CLOUD_TABLE, TABLE, Action, action
from actors.driver import Found, Presence
from projections.vm import Phase
from tests.given import HISTORIES, PHASES, life

PRESENCES: tuple[Presence, ...] = get_args(Presence)

CELLS: tuple[tuple[Phase | None, Presence, Action, str], ...] = (
    ("requested", "absent", "wait-turn", "its turn had not come; it waits again"),
    (
        "requested",
        "half-made",
        "fail-half-made",
        "nothing should be there before its turn: tear down, never spawn on top",
    ),
    ("requested", "running", "fail-half-made", "no fact allowed it to start, so nobody may count on it"),
    ("requested", "foreign", "fail-half-made", "its place is taken: a spawn would meet what is there"),
    ("requested", "unknown", "ask-again", "a host that cannot say is no reason to act"),
    (
        "starting",
        "absent",
        "spawn",
        "its turn had come and the crash was before the first touch: start it now",
    ),
    ("starting", "half-made", "fail-half-made", "nobody knows how far it came: a fresh one is safer"),
    (
        "starting",
        "running",
        "take-up",
        "the crash was between spawn and fact: a second spawn would make two machines",
    ),
    ("starting", "foreign", "fail-half-made", "another has its place; ours never came up"),
    ("starting", "unknown", "ask-again", "it may run: spared until the host can say"),
    ("spawned", "absent", "fail-gone", "it ran and does not: the log must say so"),
    ("spawned", "half-made", "fail-gone", "it does not run any more; its traces are torn down"),
    ("spawned", "running", "take-up", "it runs on: watch it again"),
    ("spawned", "foreign", "fail-gone", "ours is gone, and what is there is not touched"),
    ("spawned", "unknown", "ask-again", "doubt never ends a life"),
    ("registered", "absent", "fail-gone", "its job died with it: the log must say so"),
    ("registered", "half-made", "fail-gone", "it does not run any more; its traces are torn down"),
    ("registered", "running", "take-up", "its job goes on as if nothing had been"),
    ("registered", "foreign", "fail-gone", "ours is gone, and what is there is not touched"),
    ("registered", "unknown", "ask-again", "doubt never ends a job"),
    ("draining", "absent", "tear-down", "only the driver's own confirmation frees the slot"),
    ("draining", "half-made", "tear-down", "the crash came in the middle of the teardown: finish it"),
    ("draining", "running", "tear-down", "the teardown had not begun: begin it"),
    ("draining", "foreign", "tear-down", "the driver confirms ours is gone and leaves the other alone"),
    (
        "draining",
        "unknown",
        "tear-down",
        "the driver asks again by itself and refuses in doubt; it is retried",
    ),
    ("failed", "absent", "tear-down", "only the driver's own confirmation frees the slot"),
    ("failed", "half-made", "tear-down", "a failed spawn leaves what it made to the teardown"),
    ("failed", "running", "tear-down", "a spawn that came up late must not outlive its failure"),
    ("failed", "foreign", "tear-down", "the driver confirms ours is gone and leaves the other alone"),
    ("failed", "unknown", "tear-down", "the driver asks again by itself and refuses in doubt; it is retried"),
    ("reaped", "absent", "nothing", "that is what reaped means"),
    ("reaped", "half-made", "report", "the confirmation was wrong: a person must see that"),
    (
        "reaped",
        "running",
        "report",
        "the confirmation was wrong: a person must see that, and nothing is killed",
    ),
    ("reaped", "foreign", "nothing", "its place was given to somebody else since"),
    ("reaped", "unknown", "nothing", "nothing is owed, so nothing is asked"),
    (None, "absent", "nothing", "neither log nor host knows it"),
    (None, "half-made", "report", "nothing is removed because a record is missing"),
    (None, "running", "report", "nothing is killed because a record is missing"),
    (None, "foreign", "report", "nothing is killed because a record is missing"),
    (None, "unknown", "report", "doubt about what nobody knows is for a person"),
)


@pytest.mark.parametrize(
    ("phase", "presence", "wanted", "why"),
    CELLS,
    ids=[f"{phase}-{presence}" for phase, presence, *_ in CELLS],
)
def test_each_cell_of_the_recovery_table_does_what_its_reason_asks(
    phase: Phase | None, presence: Presence, wanted: Action, why: str
) -> None:
    assert TABLE[(phase, presence)] == wanted, why


def test_every_phase_meets_every_presence_and_no_cell_is_left_untested() -> None:
    cells = {(phase, presence) for phase in (*PHASES, None) for presence in PRESENCES}
    assert set(TABLE) == cells
    assert [(phase, presence) for phase, presence, *_ in CELLS] == list(dict.fromkeys(TABLE))
    used = {*TABLE.values(), *CLOUD_TABLE.values()}
    assert used == set(get_args(Action)), "an action nobody takes, or one nobody knows"


def test_doubt_never_spawns_fails_or_takes_up() -> None:
    in_doubt = {what for (_, presence), what in TABLE.items() if presence == "unknown"}
    assert in_doubt <= {"ask-again", "tear-down", "nothing", "report"}


def test_a_second_machine_is_spawned_only_where_there_is_provably_none() -> None:
    assert [cell for cell, what in TABLE.items() if what == "spawn"] == [("starting", "absent")]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("presence", PRESENCES)
def test_on_the_same_boot_the_table_decides(phase: Phase, presence: Presence) -> None:
    found = Found(presence=presence, evidence="looked")
    assert action(life(HISTORIES[phase]), found, "boot-1") == TABLE[(phase, presence)]


@pytest.mark.parametrize("presence", PRESENCES)
@pytest.mark.parametrize("phase", ["starting", "spawned", "registered"])
def test_a_machine_of_an_earlier_boot_is_gone_whatever_stands_in_its_place(
    phase: Phase, presence: Presence
) -> None:
    """A pid that is reused after a reboot must not be taken for ours, and a job is never silently started twice."""
    found = Found(presence=presence, evidence="looked")
    assert action(life(HISTORIES[phase]), found, "boot-2") == "fail-gone"


@pytest.mark.parametrize("presence", PRESENCES)
@pytest.mark.parametrize("phase", ["requested", "draining", "failed", "reaped"])
def test_a_reboot_changes_nothing_for_what_had_not_started_or_was_over(
    phase: Phase, presence: Presence
) -> None:
    found = Found(presence=presence, evidence="looked")
    assert action(life(HISTORIES[phase]), found, "boot-2") == TABLE[(phase, presence)]


CLOUD_CELLS: tuple[tuple[Phase, Action, str], ...] = (
    ("requested", "wait-turn", "no provisioner was asked: its turn comes again"),
    ("starting", "nothing", "its start was offered in the log: a second offer would be a second machine"),
    ("spawned", "nothing", "its agent may come at any moment, or its deadline"),
    ("registered", "listen", "its job goes on; only its agent can tell"),
    ("draining", "tear-down", "its end was offered; when nobody confirms it, it is offered again"),
    ("failed", "tear-down", "its end was offered; when nobody confirms it, it is offered again"),
    ("reaped", "nothing", "nothing is owed"),
)


@pytest.mark.parametrize(("phase", "wanted", "why"), CLOUD_CELLS, ids=[cell[0] for cell in CLOUD_CELLS])
@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
@pytest.mark.parametrize("presence", PRESENCES)
def test_a_cloud_machine_is_not_judged_by_our_host(
    phase: Phase, wanted: Action, why: str, presence: Presence, boot_id: str
) -> None:
    state = msgspec.structs.replace(life(HISTORIES[phase]), backend="event")
    assert action(state, Found(presence=presence, evidence="looked"), boot_id) == wanted, why


def test_the_cloud_table_has_every_phase() -> None:
    assert [phase for phase, *_ in CLOUD_CELLS] == list(CLOUD_TABLE) == list(PHASES)

"""What a sweep may take: every cell of log times host with its reason, owners, addresses, and how the living stand."""

from itertools import product
from typing import Any, get_args

import pytest

from actors.decisions.reclaim import (
    TABLE,
    Action,
    Known,
    Standing,
    Verdict,
    classify,
    judge,
    machine_places,
)
from actors.reclaiming import Leftover, Life

CELLS: tuple[tuple[Standing, Life, Action, str], ...] = (
    (
        "live",
        "dead",
        "keep",
        "its own life ends with a teardown that is written down: nobody runs ahead of it",
    ),
    ("live", "alive", "keep", "it works"),
    ("live", "doubt", "keep", "its own recovery asks again"),
    ("reaped", "dead", "reap", "the log promises that nothing is left, and something is"),
    ("reaped", "alive", "spare", "a log that is wrong about it is no reason to end a job"),
    ("reaped", "doubt", "spare", "doubt never takes files from under a process"),
    ("absent", "dead", "reap", "the log was lost or changed, and nothing runs in it"),
    ("absent", "alive", "spare", "a missing record never kills"),
    ("absent", "doubt", "spare", "doubt never takes files from under a process"),
    ("unread", "dead", "spare", "a log that does not answer is no evidence"),
    ("unread", "alive", "spare", "a log that does not answer is no evidence"),
    ("unread", "doubt", "spare", "a log that does not answer is no evidence"),
)


def thing(kind: str = "chroot", name: str = "/j/a", **changes: Any) -> Leftover:
    machine = kind not in ("tap", "rules")
    fields: dict[str, Any] = {
        "vm": "a" if machine else None,
        "owner": "me",
        "life": "dead",
        "evidence": "seen",
        "address": "" if machine else "10.0.0.2",
    }
    return Leftover(kind=kind, name=name, **(fields | changes))


def known(standing: Standing = "absent", **changes: Any) -> Known:
    fields: dict[str, Any] = {"owner": "me", "standing": {"a": standing}, "leased": frozenset()}
    return Known(**(fields | changes))


def only(listing: Leftover, knowing: Known) -> Verdict:
    (verdict,) = judge([listing], knowing)
    return verdict


def actions(listing: list[Leftover], knowing: Known) -> dict[str, Action]:
    return {each.leftover.name: each.action for each in judge(listing, knowing)}


@pytest.mark.parametrize(("standing", "life", "wanted", "why"), CELLS)
def test_the_log_times_the_host(standing: Standing, life: Life, wanted: Action, why: str) -> None:
    assert only(thing(life=life), known(standing)).action == wanted, why


def test_the_table_is_whole_and_only_the_dead_are_taken() -> None:
    cells = set(product(get_args(Standing), get_args(Life)))
    assert set(TABLE) == cells == {(standing, life) for standing, life, _, _ in CELLS}
    assert {life for (_, life), (action, _) in TABLE.items() if action == "reap"} == {"dead"}


@pytest.mark.parametrize(("standing", "life", "_wanted", "_why"), CELLS)
def test_what_bears_another_name_or_none_is_never_taken(
    standing: Standing, life: Life, _wanted: Action, _why: str
) -> None:
    assert only(thing(owner="other", life=life), known(standing)).action == "keep"
    unnamed = only(thing(owner=None, life=life), known(standing)).action
    assert unnamed == ("keep" if standing == "live" else "spare")
    assert only(thing(vm=None, owner=None, life=life), known(standing)).action == "spare"


@pytest.mark.parametrize("life", ["alive", "doubt"])
def test_a_dead_thing_of_a_machine_that_lives_elsewhere_on_the_host_is_spared(life: Life) -> None:
    listing = [thing("cgroup", "/c/a"), thing("chroot", "/j/a", life=life)]
    assert actions(listing, known()) == {"/c/a": "spare", "/j/a": "spare"}
    listing = [thing("cgroup", "/c/a", life=life), thing("chroot", "/j/a")]
    assert actions(listing, known()) == {"/c/a": "spare", "/j/a": "spare"}


def test_a_machine_nobody_asked_about_is_spared() -> None:
    assert only(thing(vm="b"), known()).action == "spare"


@pytest.mark.parametrize("kind", ["tap", "rules"])
@pytest.mark.parametrize(
    ("changes", "knowing", "wanted"),
    [
        ({}, {}, "reap"),
        ({}, {"leased": frozenset({"10.0.0.2"})}, "keep"),
        ({"life": "alive"}, {"leased": frozenset({"10.0.0.2"})}, "keep"),
        ({}, {"leased": frozenset({"10.0.0.20"})}, "reap"),
        ({}, {"leased": None}, "spare"),
        ({}, {"whole": False}, "spare"),
        ({"life": "alive"}, {}, "spare"),
        ({"life": "doubt"}, {}, "spare"),
        ({"owner": None}, {}, "spare"),
        ({"owner": "bridge br1"}, {}, "keep"),
    ],
)
def test_what_belongs_to_an_address(
    kind: str, changes: dict[str, Any], knowing: dict[str, Any], wanted: Action
) -> None:
    assert only(thing(kind, "flt-0a000002", **changes), known(**knowing)).action == wanted


@pytest.mark.parametrize(
    "holder",
    [{"life": "alive"}, {"life": "doubt"}, {"owner": "other"}, {"owner": None}],
    ids=["living", "in-doubt", "somebody-elses", "nobody-knows-whose"],
)
def test_the_network_of_a_machine_that_stays_is_spared(holder: dict[str, Any]) -> None:
    listing = [thing("tap", "t"), thing("rules", "r"), thing("chroot", "/j/a", address="10.0.0.2", **holder)]
    found = actions(listing, known())
    assert (found["t"], found["r"]) == ("spare", "spare")


def test_the_network_of_a_machine_that_goes_goes_with_it_and_the_directory_goes_last() -> None:
    listing = [
        thing("chroot", "/j/a", address="10.0.0.2"),
        thing("cgroup", "/c/a"),
        thing("tap", "t"),
        thing("rules", "r"),
    ]
    verdicts = judge(listing, known("reaped"))
    assert [each.action for each in verdicts] == ["reap"] * 4
    assert [each.leftover.kind for each in verdicts] == ["rules", "tap", "cgroup", "chroot"]


def test_rules_stay_while_a_process_has_the_tap_of_their_address_open() -> None:
    assert actions([thing("tap", "t", life="alive"), thing("rules", "r")], known()) == {
        "t": "spare",
        "r": "spare",
    }


@pytest.mark.parametrize(
    ("standing", "changes", "status"),
    [
        ("live", {}, "tracked"),
        ("live", {"owner": None}, "tracked"),
        ("absent", {}, "orphaned"),
        ("reaped", {}, "orphaned"),
        ("unread", {}, "unverified"),
        ("absent", {"life": "doubt"}, "unverified"),
        ("absent", {"owner": None}, "unverified"),
        ("absent", {"owner": "other"}, "tracked"),
        ("absent", {"kind": "cgroup"}, "unverified"),
    ],
)
def test_how_a_living_machine_stands(standing: Standing, changes: dict[str, Any], status: str) -> None:
    machine = classify(thing(**({"life": "alive"} | changes)), known(standing))
    assert machine.status == status
    assert machine.why


def test_a_living_machine_is_listed_once_by_what_says_most_of_it() -> None:
    listing = [
        thing("cgroup", "/c/a", life="alive"),
        thing("chroot", "/j/a", life="alive", pid=7),
        thing("chroot", "/j/b", vm="b"),
        thing("tap", "t", life="alive"),
    ]
    (place,) = machine_places(listing)
    assert (place.name, place.pid) == ("/j/a", 7)

"""A rebuild brings back the same rows, and verify names every row that differs."""

from collections.abc import Iterator

import msgspec
import pytest

from infra.rebuild import RebuildFailed, rebuild
from infra.verify import verify_tables
from projections.catalogue import FLEET, TIMELINE, VIEWS
from projections.fleet import AGENTS
from tests.contract.projector_rig import (
    QUICK,
    AnyRows,
    Start,
    StillClock,
    any_rows,
    at,
    in_order,
    projectors,
    scan,
    until,
)
from tests.fleet_log import ListLog, Story, unknown_fact


@pytest.fixture(params=["memory", "postgres"])
def rows(request: pytest.FixtureRequest) -> Iterator[AnyRows]:
    yield from any_rows(request)


@pytest.fixture
def start() -> Iterator[Start]:
    yield from projectors()


def test_a_rebuild_equals_what_was_projected_fact_by_fact(rows: AnyRows, start: Start) -> None:
    log = ListLog(Story(8).run(300).facts)
    for view in VIEWS:
        projector = start(log, rows, view, msgspec.structs.replace(QUICK, batch_facts=3))
        until(projector, at(len(log.facts)))
        projector.stop()
    before = [scan(rows, view) for view in VIEWS]
    seen: list[tuple[str, int, int]] = []
    done = rebuild(log, rows, StillClock(), VIEWS, progress=lambda *step: seen.append(step))
    assert [scan(rows, view) for view in VIEWS] == before
    assert [found.sequence for found in done] == [len(log.facts)] * 2
    assert seen[-1] == ("timeline", len(log.facts), len(log.facts))
    assert in_order(log, rows)


def test_a_rebuild_under_a_running_projector_lets_it_do_the_work(rows: AnyRows, start: Start) -> None:
    story = Story(8).run(300)
    log = ListLog(list(story.facts))
    projector = start(log, rows)
    until(projector, lambda status: status.stage == "live")
    rebuild(log, rows, StillClock(), [FLEET])
    story.run(30)
    log.write(*story.facts[len(log.facts) :])
    until(projector, at(len(story.facts)))
    projector.stop()
    assert verify_tables(log, rows, FLEET) == []


def test_a_rebuild_of_a_log_that_can_not_be_folded_fails_with_the_reason(rows: AnyRows) -> None:
    story = Story(8).run(20)
    log = ListLog([*story.facts, unknown_fact(len(story.facts) + 1)])
    with pytest.raises(RebuildFailed, match="teleported"):
        rebuild(log, rows, StillClock(), [FLEET])


def test_verify_names_every_row_that_differs(rows: AnyRows, start: Start) -> None:
    log = ListLog(Story(8).run(300).facts)
    for view in VIEWS:
        projector = start(log, rows, view)
        until(projector, at(len(log.facts)))
        projector.stop()
    agents = scan(rows, FLEET)["agents"]
    wrong = msgspec.structs.replace(agents[0], owner="nobody")
    stranger = msgspec.structs.replace(agents[1], id="vm-stranger")
    lost = agents[2].id  # type: ignore[attr-defined]
    end = len(log.facts)
    rows.save(FLEET, end, end, {AGENTS: {wrong.id: wrong, "vm-stranger": stranger, lost: None}})  # type: ignore[attr-defined]
    found = {(d.kind, d.where, d.key) for d in verify_tables(log, rows, FLEET)}
    assert found == {
        ("different-row", "agents", agents[0].id),  # type: ignore[attr-defined]
        ("extra-row", "agents", "vm-stranger"),
        ("missing-row", "agents", lost),
    }
    changed = list(log.facts)
    changed[3] = msgspec.structs.replace(changed[3], cause="another")
    detail = verify_tables(ListLog(changed), rows, TIMELINE)
    assert [(d.kind, d.key) for d in detail] == [("different-row", "4")]
    assert "another" in detail[0].detail


def test_verify_finds_history_that_is_missing_or_too_much(rows: AnyRows) -> None:
    facts = Story(8).run(60).facts
    rows.checkpoint(TIMELINE)
    log = ListLog(facts)
    some = rebuild(log, rows, StillClock(), [TIMELINE])[0].sequence
    cut = [*facts[:10], *facts[11:]]
    shorter = [d.kind for d in verify_tables(ListLog(cut), rows, TIMELINE)]
    assert shorter == ["extra-row"]
    rows.save(TIMELINE, some, some, {})
    extra = msgspec.structs.replace(facts[0], sequence=some + 1)
    log.facts.append(extra)
    rows.save(TIMELINE, some, some + 1, {})
    assert [d.kind for d in verify_tables(log, rows, TIMELINE)] == ["missing-row"]


def test_verify_says_when_there_are_no_rows_of_this_version(rows: AnyRows) -> None:
    found = verify_tables(ListLog(Story(8).facts), rows, FLEET)
    assert [(d.kind, d.where) for d in found] == [("no-table", "fleet")]
    assert "fleetlog rebuild" in found[0].detail

"""What was written once must be read for ever: every recorded fact and log decodes, folds and keeps its meaning today."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events import allocator, backend, claim, coordinator, demand, scale, vm
from events.codec import EVENT_TYPES, TAGS, UPCASTS, decode, recorded_as_form
from events.envelope import Event, Recorded, Unknown
from projections.allocator import AllocatorState
from projections.allocator import evolve as evolve_allocator
from projections.backend import BackendState
from projections.backend import evolve as evolve_backend
from projections.backend import evolve_vm as evolve_backend_vm
from projections.claim import evolve as evolve_claim
from projections.coordinator import CoordinatorState
from projections.coordinator import evolve as evolve_coordinator
from projections.demand import DemandState
from projections.demand import evolve as evolve_demand
from projections.vm import evolve as evolve_vm
from tests.golden import record
from tests.golden.record import EVENTS, LOGS
from tests.golden.record_log import end_state

EVENT_FILES = sorted(EVENTS.glob("*.json"))
LOG_FILES = sorted(LOGS.glob("*.jsonl"))


def lost(recorded: Any, today: Any, place: str = "") -> list[str]:
    """Return what was recorded and is not the same today; what is new today is no loss."""
    if isinstance(recorded, dict) and isinstance(today, dict):
        return [
            found
            for key, value in recorded.items()
            for found in (
                lost(value, today[key], f"{place}.{key}")
                if key in today
                else [f"{place}.{key}: {value!r} is gone"]
            )
        ]
    if isinstance(recorded, list) and isinstance(today, list) and len(recorded) == len(today):
        pairs = zip(recorded, today, strict=True)
        return [found for i, (old, new) in enumerate(pairs) for found in lost(old, new, f"{place}[{i}]")]
    return [] if recorded == today else [f"{place}: {recorded!r} is {today!r} now"]


def test_lost_finds_what_is_gone_or_changed_and_nothing_else() -> None:
    assert not lost({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2, "new": 3}], "c": 4})
    assert lost({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == [".a[1].b: 2 is 3 now"]
    assert lost({"a": 1}, {}) == [".a: 1 is gone"]
    assert lost({"a": [1]}, {"a": []})


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: str(kind.__struct_config__.tag))
def test_every_released_event_has_golden_files_that_set_all_its_fields(kind: type[Event]) -> None:
    assert record.files_of(str(kind.__struct_config__.tag)), "run `python -m tests.golden.record`"
    assert not record.unrecorded(kind), "a field was added: run `python -m tests.golden.record`"


@pytest.mark.parametrize("path", EVENT_FILES, ids=lambda path: str(path.stem))
def test_a_recorded_fact_still_decodes_and_says_the_same(path: Path) -> None:
    written = path.read_bytes()
    fact = decode(written, 5)
    assert not isinstance(fact.event, Unknown), (
        f"{fact.tag} was released once: keep its class or add an upcast"
    )
    before = msgspec.json.decode(written)
    if before["event"]["tag"] in UPCASTS:
        before["event"] = msgspec.to_builtins(fact.event)  # the upcast says what it means today
    assert not lost(before, msgspec.json.decode(recorded_as_form(fact)))
    assert decode(recorded_as_form(fact), 5) == fact


def _requested() -> Recorded:
    return decode((EVENTS / "vm.requested.json").read_bytes(), 3)


def _fold_vm(fact: Recorded) -> object:
    first = _requested()
    state = evolve_vm(None, first.event, first)
    if fact.version == 1:
        return state
    slot = backend.SlotTaken(vm=state.id)
    taken = evolve_backend(BackendState(), slot, msgspec.structs.replace(fact, version=1, event=slot))
    assert state.id in taken.slots
    evolve_backend_vm(taken, fact.event, fact)
    return evolve_vm(state, fact.event, fact)


def _fold_claim(fact: Recorded) -> object:
    if fact.tag == "claim.registered":
        return evolve_claim(None, fact.event, fact)
    first = decode((EVENTS / "claim.registered.json").read_bytes(), 3)
    second = msgspec.structs.replace(fact, version=2)
    state = evolve_claim(evolve_claim(None, first.event, first), second.event, second)
    return msgspec.structs.replace(state, version=fact.version)


FOLDS: tuple[tuple[Any, Callable[[Recorded], object]], ...] = (
    (vm.VmEvent, _fold_vm),
    (allocator.AllocatorEvent, lambda fact: evolve_allocator(AllocatorState(), fact.event, fact)),
    (backend.BackendEvent, lambda fact: evolve_backend(BackendState(), fact.event, fact)),
    (coordinator.CoordinatorEvent, lambda fact: evolve_coordinator(CoordinatorState(), fact.event, fact)),
    (demand.DemandEvent, lambda fact: evolve_demand(DemandState(), fact.event, fact)),
    (claim.ClaimEvent, _fold_claim),
    (scale.ScaleEvent, lambda fact: fact),  # told to provisioners: nothing here folds it
)


@pytest.mark.parametrize("path", EVENT_FILES, ids=lambda path: str(path.stem))
def test_a_recorded_fact_still_folds(path: Path) -> None:
    fact = decode(path.read_bytes(), 5)
    folds = [fold for kinds, fold in FOLDS if isinstance(fact.event, kinds)]
    assert len(folds) == 1, f"no fold here takes {fact.tag}: add its aggregate"
    state = folds[0](fact)
    assert (state.version, state.sequence) == (fact.version, 3 if fact.tag == "vm.requested" else 5)  # type: ignore[attr-defined]


def _facts(path: Path) -> list[Recorded]:
    lines = path.read_bytes().splitlines()
    return [decode(line, sequence) for sequence, line in enumerate(lines, 1)]


@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: str(path.stem))
def test_a_recorded_log_still_folds_to_its_recorded_end(path: Path) -> None:
    recorded = msgspec.json.decode(path.with_suffix(".state.json").read_bytes())
    assert not lost(recorded, end_state(_facts(path)))


@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: str(path.stem))
def test_a_recorded_log_is_written_again_without_a_loss(path: Path) -> None:
    for line, fact in zip(path.read_bytes().splitlines(), _facts(path), strict=True):
        assert not lost(msgspec.json.decode(line), msgspec.json.decode(recorded_as_form(fact)))


def test_the_recorded_logs_hold_every_kind_of_fact_of_their_release() -> None:
    assert {fact.tag for path in LOG_FILES for fact in _facts(path)} >= set(TAGS) - LATER_TAGS


LATER_TAGS: frozenset[str] = frozenset()
"""Tags released after the last recorded log; record a new one rather than let this grow."""


def test_recording_again_adds_nothing_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "events"
    shutil.copytree(EVENTS, copy)
    (copy / "vm.spared.json").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    monkeypatch.setattr(record, "EVENTS", copy)
    monkeypatch.setattr(record, "HERE", tmp_path)
    record.main()
    record.main()
    assert {path.name for path in copy.iterdir()} == {*kept, "vm.spared.json"}
    assert all((copy / name).stat().st_mtime_ns == written for name, written in kept.items())


def test_a_field_added_to_a_released_event_gets_a_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "events"
    shutil.copytree(EVENTS, copy)
    older = msgspec.json.decode((copy / "vm.reaped.json").read_bytes())
    del older["event"]["evidence"]  # as if that had been recorded before the field was there
    (copy / "vm.reaped.json").write_bytes(msgspec.json.encode(older))
    monkeypatch.setattr(record, "EVENTS", copy)
    monkeypatch.setattr(record, "HERE", tmp_path)
    assert record.unrecorded(vm.Reaped) == {"evidence"}
    record.main()
    assert record.fields_in(copy / "vm.reaped.2.json") == {"reason", "slot", "evidence"}
    assert not record.unrecorded(vm.Reaped)

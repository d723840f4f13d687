"""Bytes and facts: older forms are upcast, unknown tags parked whole, broken ones refused with their place."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from events import codec
from events.codec import EVENT_TYPES, TAGS, Form, Malformed, decode, encode, recorded_as_form, tag_of
from events.envelope import Unknown
from events.vm import Draining, Reaped
from projections.vm import evolve
from tests.given import HISTORIES, life, recorded
from tests.golden.record import files_of

AT = datetime(2026, 5, 1, 12, 0, 0, 123_456, UTC)


def wire(event: dict[str, Any], **envelope: Any) -> bytes:
    """Return a fact as somebody else may have written it."""
    form = {
        "aggregate": "vm.a-0001",
        "version": 6,
        "at": "2026-05-01T12:00:00.123456Z",
        "writer": "alpha",
        "cause": "c",
        "correlation": "c",
        "attempt": "a",
        "event": event,
        **envelope,
    }
    return msgspec.json.encode(form)


def test_a_fact_comes_back_as_it_was_written() -> None:
    event = Draining(reason="job-complete", exit_code=0)
    form = Form(
        aggregate="vm.a-0001",
        version=5,
        at=AT,
        writer="alpha",
        cause="agent:s",
        correlation="d",
        attempt="f" * 32,
        event=event,
        epoch=3,
    )
    fact = decode(encode(form), 77)
    assert (fact.sequence, fact.id, fact.at, fact.epoch, fact.event) == (77, "vm.a-0001:5", AT, 3, event)
    assert fact.tag == "vm.draining"


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: str(kind.__struct_config__.tag))
def test_every_event_is_frozen_keyword_only_and_known_by_its_tag(kind: type[Any]) -> None:
    event = decode(files_of(str(kind.__struct_config__.tag))[-1].read_bytes(), 1).event
    assert TAGS[tag_of(event)] is kind
    assert kind.__struct_config__.frozen
    with pytest.raises(AttributeError):
        setattr(event, (kind.__struct_fields__ or ("anything",))[0], None)
    if kind.__struct_fields__:
        with pytest.raises(TypeError):
            kind(*(getattr(event, field) for field in kind.__struct_fields__))


@pytest.fixture
def older_tag() -> Iterator[None]:
    """An earlier release wrote `vm.buried` with `why`; today it is `vm.reaped` with `reason`, `slot` and `evidence`."""

    def upcast(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "tag": "vm.reaped",
            "reason": fields["why"],
            "slot": "backend.alpha.small",
            "evidence": "written before evidence was",
        }

    codec.UPCASTS["vm.buried"] = upcast
    yield
    del codec.UPCASTS["vm.buried"]


@pytest.mark.usefixtures("older_tag")
def test_an_older_form_is_read_as_todays_event_and_folds() -> None:
    fact = decode(wire({"tag": "vm.buried", "why": "job-complete"}), 60)
    assert fact.event == Reaped(
        reason="job-complete", slot="backend.alpha.small", evidence="written before evidence was"
    )
    state = life(HISTORIES["draining"])
    assert evolve(state, fact.event, fact).phase == "reaped"


@pytest.mark.usefixtures("older_tag")
@pytest.mark.parametrize("event", [{"tag": "vm.buried"}, {"tag": "vm.buried", "why": 7}])
def test_an_older_form_that_its_upcast_cannot_take_is_malformed_at_its_sequence(
    event: dict[str, Any],
) -> None:
    with pytest.raises(Malformed, match=r"sequence 60: upcast of vm\.buried"):
        decode(wire(event), 60)


def test_an_unknown_tag_is_parked_whole_and_can_be_written_again() -> None:
    """A newer fleetlog wrote it: an older one must neither skip it nor lose a byte of it."""
    written = wire({"tag": "vm.teleported", "to": {"host": "beta", "list": [1, 2.5, None]}})
    fact = decode(written, 60)
    assert isinstance(fact.event, Unknown)
    assert (fact.tag, fact.version) == ("vm.teleported", 6)
    again = msgspec.json.decode(recorded_as_form(fact))
    assert again["event"] == {"tag": "vm.teleported", "to": {"host": "beta", "list": [1, 2.5, None]}}
    assert decode(recorded_as_form(fact), 60) == fact


def test_a_field_of_a_newer_release_is_passed_over() -> None:
    fact = decode(wire({"tag": "vm.condemned", "reason": "operator", "evidence": "e", "mood": "grim"}), 60)
    assert fact.event.evidence == "e"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        wire({"tag": "vm.condemned", "reason": "boredom", "evidence": "e"}),
        wire({"tag": "vm.condemned"}),
        wire({"reason": "operator"}),
        wire({"tag": "vm.spared", "evidence": "e"}, version="six"),
        wire({"tag": "vm.spared", "evidence": "e"}, at="yesterday"),
        wire({"tag": "vm.teleported"}, version=None),
        b'{"aggregate": "vm.x", "version": 1',
    ],
)
def test_bytes_that_are_no_fact_are_refused_with_their_sequence(payload: bytes) -> None:
    with pytest.raises(Malformed, match="sequence 60"):
        decode(payload, 60)


def test_a_fact_can_be_told_from_something_else() -> None:
    assert tag_of(Unknown(tag="vm.teleported", raw=b"{}")) == "vm.teleported"
    with pytest.raises(AssertionError, match="not a fact"):
        tag_of("vm.spawned")


def test_recorded_facts_know_their_ids() -> None:
    fact = recorded(Draining(reason="drain"), 5)
    assert (fact.id, fact.tag) == ("vm.a-0001:5", "vm.draining")

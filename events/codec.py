"""Bytes to event and back: upcasts of older forms, and unknown tags parked, never skipped."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from events import allocator, backend, claim, coordinator, demand, scale, vm
from events.envelope import Event, Recorded, Unknown, tag_of

AnyEvent = (
    vm.VmEvent
    | backend.BackendEvent
    | allocator.AllocatorEvent
    | coordinator.CoordinatorEvent
    | demand.DemandEvent
    | claim.ClaimEvent
    | scale.ScaleEvent
)

UPCASTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Older tag -> function that turns its fields into those of a newer tag (which it sets as `tag`). Pure."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A fact on the wire: JSON, one object. The stream's subject repeats the aggregate, a header the tag."""

    aggregate: str
    version: int
    at: datetime
    writer: str
    cause: str
    correlation: str
    attempt: str
    event: AnyEvent
    epoch: int = 0


class RawForm(msgspec.Struct, frozen=True, kw_only=True):
    """The same with the event undecoded: for tags this code does not know, and for upcasts."""

    aggregate: str
    version: int
    at: datetime
    writer: str
    cause: str
    correlation: str
    attempt: str
    event: msgspec.Raw
    epoch: int = 0


class Malformed(Exception):  # noqa: N818 - a name for the state of the record, not for an accident
    """These bytes are no fact: the message says what is wrong and at which sequence."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Form)
_raw_decoder = msgspec.json.Decoder(RawForm)
_fields_decoder = msgspec.json.Decoder(dict[str, Any])
_event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(form: Form) -> bytes:
    """Return the wire form of a fact."""
    return _encoder.encode(form)


def decode(payload: bytes | memoryview, sequence: int) -> Recorded:
    """Return the fact in `payload`; its event is `Unknown` when no code here knows the tag.

    Raises:
        Malformed: the bytes are not the form of a fact, or a known tag has impossible fields.
    """
    try:
        form = _decoder.decode(payload)
    except msgspec.ValidationError as error:
        return _decode_older(payload, sequence, error)
    except msgspec.DecodeError as error:
        raise Malformed(f"sequence {sequence}: not JSON: {error}") from error
    return _recorded(form, form.event, sequence)


def _recorded(form: Form | RawForm, event: AnyEvent | Unknown, sequence: int) -> Recorded:
    return Recorded(
        sequence=sequence,
        aggregate=form.aggregate,
        version=form.version,
        at=form.at,
        writer=form.writer,
        epoch=form.epoch,
        cause=form.cause,
        correlation=form.correlation,
        attempt=form.attempt,
        event=event,
    )


def _decode_older(payload: bytes | memoryview, sequence: int, first: Exception) -> Recorded:
    """Decode a fact the plain decoder refused: an older tag, an unknown one, or a broken one."""
    try:
        form = _raw_decoder.decode(payload)
        fields = _fields_decoder.decode(form.event)
        tag = fields["tag"]
    except (msgspec.DecodeError, KeyError) as error:
        raise Malformed(f"sequence {sequence}: not the form of a fact: {error}") from error
    event: AnyEvent | Unknown
    if tag in UPCASTS:
        try:
            event = msgspec.convert(UPCASTS[tag](fields), AnyEvent)
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise Malformed(f"sequence {sequence}: upcast of {tag}: {error}") from error
    elif tag in TAGS:
        raise Malformed(f"sequence {sequence}: {tag}: {first}") from first
    else:
        event = Unknown(tag=str(tag), raw=bytes(form.event))
    return _recorded(form, event, sequence)


def public(event: AnyEvent) -> AnyEvent:
    """Return the event as it may be shown and kept elsewhere: without the claim code, which only the log itself has."""
    if isinstance(event, scale.Up):
        return msgspec.structs.replace(event, claim_code="hidden")
    return event


def recorded_as_form(fact: Recorded) -> bytes:
    """Return the wire form of a recorded fact again, also of a parked unknown one."""
    if isinstance(fact.event, Unknown):
        raw = msgspec.Raw(fact.event.raw)
    else:
        raw = msgspec.Raw(_encoder.encode(fact.event))
    return _encoder.encode(
        RawForm(
            aggregate=fact.aggregate,
            version=fact.version,
            at=fact.at,
            writer=fact.writer,
            epoch=fact.epoch,
            cause=fact.cause,
            correlation=fact.correlation,
            attempt=fact.attempt,
            event=raw,
        )
    )


EVENT_TYPES: tuple[type[Event], ...] = tuple(AnyEvent.__args__)
"""Every released event class; each has a golden file for ever."""

TAGS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in EVENT_TYPES}
"""Tag -> class."""

__all__ = [
    "EVENT_TYPES",
    "TAGS",
    "UPCASTS",
    "AnyEvent",
    "Form",
    "Malformed",
    "decode",
    "encode",
    "public",
    "recorded_as_form",
    "tag_of",
]

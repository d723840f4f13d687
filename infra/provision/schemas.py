"""The JSON Schemas of the public contract, made from the structs that are encoded and decoded: no copy can fall behind."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from events.codec import Form
from events.envelope import Resources
from events.scale import CONTRACT, Down, Up
from infra.api.messages import DoneAnswer, ErrorAnswer, ErrorBody
from infra.api.request import Request
from infra.claims.messages import RedeemAnswer, RedeemRequest
from infra.provision.messages import ProvisionReport
from infra.provision.words import described

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class UpFact(Form, frozen=True, kw_only=True):
    """A fact of the log that carries `scale.up`: what a consumer reads off the stream, one JSON object."""

    event: Up


class DownFact(Form, frozen=True, kw_only=True):
    """A fact of the log that carries `scale.down`: what a consumer reads off the stream, one JSON object."""

    event: Down


class Exchange(NamedTuple):
    """What is sent and what may come back; nothing comes back on a fact."""

    sent: type[msgspec.Struct]
    answers: tuple[type[msgspec.Struct], ...] = ()


EXCHANGES: dict[str, Exchange] = {
    "scale.up": Exchange(UpFact),
    "scale.down": Exchange(DownFact),
    "provision": Exchange(ProvisionReport, (ErrorAnswer, DoneAnswer)),
    "redeem": Exchange(RedeemRequest, (ErrorAnswer, RedeemAnswer)),
}
"""Name -> messages. A refusal comes first: nothing in it contradicts the form of `DoneAnswer`."""

_KINDS: tuple[type[msgspec.Struct], ...] = (
    UpFact,
    DownFact,
    Up,
    Down,
    Resources,
    ProvisionReport,
    DoneAnswer,
    ErrorAnswer,
    ErrorBody,
    RedeemRequest,
    RedeemAnswer,
)
"""Every struct that occurs in a message."""


def json_schema(name: str) -> Schema:
    """Return the schema of one exchange: what is sent at its root, what is answered as `#/$defs/Answer`."""
    exchange = EXCHANGES[name]
    made = definitions((exchange.sent, *exchange.answers), "#/$defs/{name}")
    if exchange.answers:
        made["Answer"] = {
            "title": "Answer",
            "description": "With `error` it is a refusal; else what was asked for.",
            "anyOf": [{"$ref": f"#/$defs/{answer.__name__}"} for answer in exchange.answers],
        }
    return {
        "$schema": DIALECT,
        "$id": f"urn:fleetlog:contract:{CONTRACT}:{name}",
        "$ref": f"#/$defs/{exchange.sent.__name__}",
        "$defs": made,
    }


def all_definitions(reference: str) -> Schema:
    """Return the schemas of all messages by name; `reference` says how one names another, as `#/$defs/{name}`."""
    return definitions(
        (kind for exchange in EXCHANGES.values() for kind in (exchange.sent, *exchange.answers)), reference
    )


def definitions(kinds: Iterable[type[msgspec.Struct]], reference: str) -> Schema:
    """Return the schemas of these messages and of all they are made of, by name."""
    known = {kind.__name__: kind for kind in _KINDS}
    _, made = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=reference)
    for name, schema in made.items():
        _complete(known[name], schema)
    return dict(made)


def _complete(kind: type[msgspec.Struct], schema: Schema) -> None:
    """Add what the types cannot say: that a text is a time, that a list of words may grow, and what each field means."""
    properties: dict[str, Schema] = schema["properties"]
    for field in msgspec.structs.fields(kind):
        if field.type is datetime:
            properties[field.encode_name]["format"] = "date-time"
    for name, shape in properties.items():
        if not issubclass(kind, Request):
            _open(shape)
        shape.setdefault("description", described(kind.__name__, name))


def _open(shape: Schema) -> None:
    """Let what fleetlog says have further words: a consumer that checks must not refuse a `scale.down` for its reason.

    A single word is a tag or a version, by which a message is known for what it is.
    """
    if len(shape.get("enum", ())) > 1:
        shape["anyOf"] = [{"enum": shape.pop("enum")}, {"type": "string"}]

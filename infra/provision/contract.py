"""The public contract as documents: AsyncAPI for people and generators, and the JSON Schema of each exchange."""

from typing import Any

import msgspec

from events import subjects
from events.scale import CONTRACT
from infra.provision import samples
from infra.provision.schemas import EXCHANGES, all_definitions, json_schema
from infra.provision.words import ACCEPTANCE, DOWN, OVERVIEW, PARAMETERS, REDEMPTION, UP

Document = dict[str, Any]

CLUSTER, TARGET, SCALER, AGENT = (f"{{{name}}}" for name in PARAMETERS)

_UP = subjects.log(CLUSTER, subjects.scale_up(TARGET, SCALER, AGENT))
_DOWN = subjects.log(CLUSTER, subjects.scale_down(TARGET, SCALER, AGENT))
_PROVISION = subjects.provision(CLUSTER, TARGET)
_REDEEM = subjects.redeem(CLUSTER)

_MESSAGES: dict[str, tuple[str, msgspec.Struct, str]] = {
    "scaleUp": ("Start one machine", samples.UP, UP),
    "scaleDown": ("End the machine of one agent", samples.DOWN, DOWN),
    "provisionReport": ("Say what became of a machine", samples.ACCEPTED, ACCEPTANCE),
    "provisionDone": ("The answer is in the log", samples.DONE, "Acknowledge the message now."),
    "redeemRequest": ("Exchange a claim code for a credential", samples.REDEEM, REDEMPTION),
    "redeemAnswer": ("A credential", samples.REDEEMED, "Connect with it and register."),
    "refused": ("Refused, or not carried out", samples.NOT_YOURS, "The operation says what each code means."),
}
"""Name -> title, an example, and what is to be said about it."""


def documents() -> dict[str, Document]:
    """Return every document of the contract by the name of its file, without the ending `.json`."""
    return {"asyncapi": asyncapi()} | {f"{name}.schema": json_schema(name) for name in EXCHANGES}


def asyncapi() -> Document:
    """Return the AsyncAPI 3.0.0 document, from the side of the provisioner and its machines."""
    return {
        "asyncapi": "3.0.0",
        "id": f"urn:fleetlog:contract:{CONTRACT}",
        "info": {
            "title": "fleetlog provisioning",
            "version": str(CONTRACT),
            "description": _overview(),
        },
        "defaultContentType": "application/json",
        "channels": {
            "scaleUp": _channel(_UP, "Wishes to start machines, read off the stream.", "scaleUp"),
            "scaleDown": _channel(_DOWN, "Wishes to end machines, read off the stream.", "scaleDown"),
            "provision": _channel(
                _PROVISION, "A provisioner's answers, as NATS requests.", "provisionReport"
            ),
            "provisionReply": _inbox("provisionDone", "refused"),
            "redeem": _channel(
                _REDEEM, "Machines show their claim codes, as NATS requests.", "redeemRequest"
            ),
            "redeemReply": _inbox("redeemAnswer", "refused"),
        },
        "operations": {
            "receiveScaleUp": _receive("scaleUp"),
            "receiveScaleDown": _receive("scaleDown"),
            "reportProvision": _request("provision", "provisionReport", "provisionDone"),
            "redeemClaim": _request("redeem", "redeemRequest", "redeemAnswer"),
        },
        "components": {
            "parameters": {name: {"description": text} for name, text in PARAMETERS.items()},
            "messages": {name: _message(name) for name in _MESSAGES},
            "schemas": all_definitions("#/components/schemas/{name}"),
        },
    }


def _overview() -> str:
    stream, consumer, pattern = _consumer("<cluster>", "<target>")
    provision = subjects.provision("<cluster>", "<target>")
    return OVERVIEW.format(stream=stream, consumer=consumer, filter=pattern, provision=provision)


def _consumer(cluster: str, target: str) -> tuple[str, str, str]:
    """Return stream, durable consumer and filter, with placeholders where the functions want names."""
    stream = subjects.stream("name").replace("NAME", cluster.upper())
    pattern = subjects.scale_of(cluster, "name").replace(".name.", f".{target}.")
    return stream, subjects.provisioner_consumer(target), pattern


def _channel(address: str, description: str, message: str) -> Document:
    return {
        "address": address,
        "description": description,
        "messages": {message: _to("components", "messages", message)},
        "parameters": {
            name: _to("components", "parameters", name) for name in PARAMETERS if f"{{{name}}}" in address
        },
    }


def _inbox(*messages: str) -> Document:
    return {
        "address": None,  # known when the request is made
        "description": "The inbox of whoever asked, below the prefix its credential allows.",
        "messages": {message: _to("components", "messages", message) for message in messages},
    }


def _receive(channel: str) -> Document:
    stream, consumer, pattern = _consumer(CLUSTER, TARGET)
    return {
        "action": "receive",
        "channel": _to("channels", channel),
        **_said(channel),
        "messages": [_to("channels", channel, "messages", channel)],
        "x-jetstream": {
            "stream": stream,
            "durable": consumer,
            "filter_subject": pattern,
            "ack_policy": "explicit",
            "max_deliver": -1,
        },
    }


def _request(channel: str, message: str, answer: str) -> Document:
    reply = f"{channel}Reply"
    return {
        "action": "send",
        "channel": _to("channels", channel),
        **_said(message),
        "messages": [_to("channels", channel, "messages", message)],
        "reply": {
            "channel": _to("channels", reply),
            "messages": [_to("channels", reply, "messages", each) for each in (answer, "refused")],
        },
    }


def _message(name: str) -> Document:
    _, example, _ = _MESSAGES[name]
    message = {
        "name": name,
        **_said(name),
        "contentType": "application/json",
        "payload": _to("components", "schemas", type(example).__name__),
        "examples": [{"name": name, "payload": msgspec.json.decode(msgspec.json.encode(example))}],
    }
    if name in ("scaleUp", "scaleDown"):
        message["correlationId"] = {"location": "$message.payload#/event/request_id"}
    return message


def _said(message: str) -> Document:
    title, _, description = _MESSAGES[message]
    return {"title": title, "description": description}


def _to(*place: str) -> Document:
    return {"$ref": "/".join(("#", *place))}

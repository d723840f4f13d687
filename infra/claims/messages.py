"""What a machine shows and what it gets for it: JSON, one object each, versioned, with limits and a schema.

A machine publishes on `fleetlog.<cluster>.api.redeem`, as a request, connected with the bootstrap identity, which can do
nothing else. The answer may be overheard by others with that identity: it is of use only with the seed of the key.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from infra.api.request import Request

Code = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="a claim code: 64 hex digits")]
UserKey = Annotated[str, Meta(pattern="^U[A-Z2-7]{55}$", description="a user's public nkey, U and 55 more")]


class RedeemRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`redeem`: exchange a claim code for a credential of this key, whose seed the machine keeps to itself."""

    code: Code
    public_key: UserKey


class RedeemAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who the machine is, and the token that lets its key in as that. Connect with it and register."""

    agent: str
    cluster: str
    labels: tuple[str, ...]
    nats_url: str
    jwt: str
    ends_at: int  # seconds since 1970
    version: Literal[1] = 1

"""NATS credentials: who may say what, as JWTs signed by our own keys.

NATS believes a chain: the operator's key signs accounts, an account's key (or one of its signing keys) signs
users, and the server checks the chain offline. So whoever holds an account's signing key mints users without
asking anybody, which is how each agent gets a credential of its own that can do almost nothing.

Nothing here reads a clock: the time of issue comes in, and a JWT's id is computed from its claims, so the same
claims give the same token. Seeds and tokens are left out of every repr; they are secrets.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import nkeys

OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
USER = nkeys.PREFIX_BYTE_USER
_UNLIMITED = -1
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_CREDS_SECTION = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s*(\S+?)\s*-{3,}END \1-{3,}")

Entropy = Callable[[int], bytes]


class CredentialError(Exception):
    """A key, token or creds file is not what it has to be; the message names which and what to do."""


@dataclass(frozen=True)
class Credential:
    """A user's token and, unless it is a bearer or the user made its own key, the seed to prove it.

    `public_key` is the user's identity (`U...`); it stays the same when the credential is renewed.
    """

    jwt: str = field(repr=False)
    seed: str | None = field(repr=False)
    public_key: str

    def creds_text(self) -> str:
        """Render as the `.creds` file every NATS client reads; needs the seed."""
        if self.seed is None:
            raise CredentialError(
                f"user {self.public_key} has no seed here: give its JWT to whoever holds the key, "
                "or connect with the JWT alone if it is a bearer token"
            )
        return (
            f"-----BEGIN NATS USER JWT-----\n{self.jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{self.seed}\n------END USER NKEY SEED------\n"
        )


@dataclass(frozen=True)
class AccountSigner:
    """The right to mint users of one account: an account's own seed or one of its signing keys."""

    seed: str = field(repr=False)
    account_public: str

    @classmethod
    def for_account_of(cls, signing_seed: str, creds: str) -> "AccountSigner":
        """Sign for the account that the user in `creds` (a creds file's text) belongs to.

        This is how an agent signing key given for an external NATS learns its account. Raises CredentialError
        when the key is no account key; whether the account lists it, only the server can tell.
        """
        public = public_key(signing_seed)
        if not public.startswith("A"):
            raise CredentialError(f"{public} is not an account key: an agent signing key begins with SA")
        claims = read_claims(parse_creds(creds).jwt)
        return cls(seed=signing_seed, account_public=claims["nats"].get("issuer_account") or claims["iss"])

    def mint(
        self,
        *,
        name: str,
        issued_at: datetime,
        expires_at: datetime | None = None,
        user_public: str | None = None,
        publish: Sequence[str] | None = None,
        subscribe: Sequence[str] | None = None,
        deny_publish: Sequence[str] = (),
        bearer: bool = False,
        responses_max: int = 0,
        responses_ttl_s: float = 0,
        entropy: Entropy = os.urandom,
    ) -> Credential:
        """Mint a user of this account; see `mint_user`."""
        return mint_user(
            self.seed,
            self.account_public,
            name=name,
            issued_at=issued_at,
            expires_at=expires_at,
            user_public=user_public,
            publish=publish,
            subscribe=subscribe,
            deny_publish=deny_publish,
            bearer=bearer,
            responses_max=responses_max,
            responses_ttl_s=responses_ttl_s,
            entropy=entropy,
        )

    def renew(self, jwt: str, *, issued_at: datetime, expires_at: datetime) -> str:
        """Return a token for the same user with the same rights and a later end.

        Refused when `jwt` was not signed by this key, so nobody gets a forged token laundered, and when its
        rights have already ended: what has expired is asked for anew, by whoever may.
        """
        claims = read_claims(jwt)
        signer = public_key(self.seed)
        if claims["iss"] != signer or not _signature_is_good(jwt, self.seed):
            raise CredentialError(f"the token of {claims['sub']} was not signed by {signer}: not renewed")
        if "exp" in claims and claims["exp"] <= issued_at.timestamp():
            raise CredentialError(f"the token of {claims['sub']} has expired: mint a new one")
        kept = {key: claims[key] for key in ("sub", "name", "nats")}
        return _signed(kept, self.seed, issued_at=issued_at, expires_at=expires_at)


def mint_user(
    signing_seed: str,
    account_public: str,
    *,
    name: str,
    issued_at: datetime,
    expires_at: datetime | None = None,
    user_public: str | None = None,
    publish: Sequence[str] | None = None,
    subscribe: Sequence[str] | None = None,
    deny_publish: Sequence[str] = (),
    bearer: bool = False,
    responses_max: int = 0,
    responses_ttl_s: float = 0,
    entropy: Entropy = os.urandom,
) -> Credential:
    """Mint a user of the account.

    `publish` and `subscribe` are the subjects allowed: None is everything in the account, an empty list is
    nothing (to NATS an empty list means everything, a trap closed here). `user_public` is given when the user
    made its own key; else one is made and its seed returned, except for a `bearer`, which connects with the
    JWT alone. `responses_max` above 0 allows that many publishes to the reply subject of each message received,
    within `responses_ttl_s`. The server cuts the connection at `expires_at`. NATS counts both ends in whole
    seconds; ours are rounded down, so a credential never outlives what was asked for.
    """
    seed = None
    if user_public is None:
        seed = new_seed(USER, entropy)
        user_public = public_key(seed)
    elif not user_public.startswith("U"):
        raise CredentialError(f"{user_public} is not a user's public key: those begin with U")
    rights: dict[str, Any] = {
        "pub": _permission(publish, deny_publish),
        "sub": _permission(subscribe, ()),
        "subs": _UNLIMITED,
        "data": _UNLIMITED,
        "payload": _UNLIMITED,
        "type": "user",
        "version": 2,
    }
    if responses_max:
        rights["resp"] = {"max": responses_max, "ttl": int(responses_ttl_s * 1e9)}
    if bearer:
        rights["bearer_token"] = True
    if _signing_public_key(signing_seed) != account_public:
        rights["issuer_account"] = account_public
    claims = {"sub": user_public, "name": name, "nats": rights}
    jwt = _signed(claims, signing_seed, issued_at=issued_at, expires_at=expires_at)
    return Credential(jwt=jwt, seed=None if bearer else seed, public_key=user_public)


def operator_jwt(operator_seed: str, *, name: str, system_account: str, issued_at: datetime) -> str:
    """Return the self-signed token at the root of the chain."""
    nats = {"type": "operator", "version": 2, "system_account": system_account}
    claims = {"sub": public_key(operator_seed), "name": name, "nats": nats}
    return _signed(claims, operator_seed, issued_at=issued_at, expires_at=None)


def account_jwt(
    operator_seed: str,
    account_public: str,
    *,
    name: str,
    issued_at: datetime,
    jetstream: bool,
    signing_keys: Sequence[str] = (),
) -> str:
    """Return an account's token, unlimited except that only `jetstream` accounts may store anything."""
    plain = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    stored = ("mem_storage", "disk_storage", "streams", "consumer")
    limits: dict[str, Any] = dict.fromkeys(plain, _UNLIMITED) | {"wildcards": True}
    limits |= dict.fromkeys(stored, _UNLIMITED if jetstream else 0)
    nats: dict[str, Any] = {"type": "account", "version": 2, "limits": limits}
    if signing_keys:
        nats["signing_keys"] = list(signing_keys)
    claims = {"sub": account_public, "name": name, "nats": nats}
    return _signed(claims, operator_seed, issued_at=issued_at, expires_at=None)


def new_seed(kind: int, entropy: Entropy = os.urandom) -> str:
    """Make a seed of the kind OPERATOR, ACCOUNT or USER from 32 bytes of chance."""
    return str(nkeys.encode_seed(entropy(32), kind), "ascii")


def public_key(seed: str) -> str:
    """Return the public key of a seed; CredentialError when it is none."""
    return str(_keypair(seed).public_key, "ascii")


def sign(seed: str, message: bytes) -> bytes:
    """Sign a message, such as a server's nonce, with a seed."""
    return bytes(_keypair(seed).sign(message))


def parse_creds(text: str) -> Credential:
    """Read a `.creds` file's text; CredentialError when a part is missing or the two do not belong together."""
    parts = {match[1]: match[2] for match in _CREDS_SECTION.finditer(text)}
    try:
        jwt, seed = parts["NATS USER JWT"], parts["USER NKEY SEED"]
    except KeyError as missing:
        raise CredentialError(f"not a NATS creds file: the section {missing} is missing") from None
    public = public_key(seed)
    if read_claims(jwt)["sub"] != public:
        raise CredentialError(f"the creds file's token is not for its own seed ({public})")
    return Credential(jwt=jwt, seed=seed, public_key=public)


def read_claims(jwt: str) -> dict[str, Any]:
    """Return a token's claims *without* checking its signature; CredentialError when it is no NATS token."""
    try:
        _, claims, _ = jwt.split(".")
        decoded = json.loads(_unpadded(claims))
    except ValueError as error:
        raise CredentialError("not a NATS token: three base64url parts with JSON claims expected") from error
    if not isinstance(decoded, dict) or not {"sub", "iss", "nats"} <= decoded.keys():
        raise CredentialError("not a NATS token: claims sub, iss and nats expected")
    return decoded


def expires_at(jwt: str) -> datetime | None:
    """Return when the token ends, None when never."""
    end = read_claims(jwt).get("exp")
    return None if end is None else datetime.fromtimestamp(end, UTC)


def _permission(allow: Sequence[str] | None, deny: Sequence[str]) -> dict[str, list[str]]:
    permission: dict[str, list[str]] = {}
    if allow:
        permission["allow"] = list(allow)
    denied = list(deny) if allow is None or allow else [">"]
    if denied:
        permission["deny"] = denied
    return permission


def _keypair(seed: str) -> nkeys.KeyPair:
    try:
        return nkeys.from_seed(seed.strip().encode())
    except (nkeys.NkeysError, ValueError) as error:
        raise CredentialError("not an nkey seed: a line of base32 that begins with S expected") from error


@lru_cache(maxsize=8)
def _signing_keypair(seed: str) -> nkeys.KeyPair:
    """Return the pair of a key that signs tokens: few, each used for every agent, and 40 us to work out."""
    return _keypair(seed)


@lru_cache(maxsize=8)
def _signing_public_key(seed: str) -> str:
    return str(_signing_keypair(seed).public_key, "ascii")


def _signed(claims: Mapping[str, Any], seed: str, *, issued_at: datetime, expires_at: datetime | None) -> str:
    body = dict(claims) | {"iss": _signing_public_key(seed), "iat": int(issued_at.timestamp())}
    if expires_at is not None:
        body["exp"] = int(expires_at.timestamp())
    # The id is a hash of everything else, as NATS' own library makes it: unique without chance.
    digest = hashlib.sha256(json.dumps(body | {"jti": ""}, sort_keys=True).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = ".".join(_base64url(json.dumps(part, separators=(",", ":")).encode()) for part in (_HEADER, body))
    return f"{head}.{_base64url(bytes(_signing_keypair(seed).sign(head.encode())))}"


def _signature_is_good(jwt: str, seed: str) -> bool:
    head, _, signature = jwt.rpartition(".")
    # ed25519 is deterministic: signing again is verifying, and needs no second library's idea of a good one.
    return _unpadded(signature) == sign(seed, head.encode())


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

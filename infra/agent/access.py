"""Credentials for agents: each may speak on its own machine's subjects and on nothing else, for a while."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from actors.errors import Refused
from actors.ports import Clock
from events import subjects
from infra.credentials import AccountSigner

TTL_S = 3600.0
"""How long an agent's credential lives; the reference gives local agents an hour as well."""

RENEW_AFTER = 0.5
"""The part of its life after which a credential is renewed.

Earlier than the two thirds that would do: what is left is how long we, or NATS, may be away before a running agent
can no longer come back.
"""

ID = "FLEETLOG_AGENT_ID"
CLUSTER = "FLEETLOG_CLUSTER"
NATS_URL = "FLEETLOG_NATS_URL"
LABELS = "FLEETLOG_AGENT_LABELS"
CREDENTIAL = "FLEETLOG_AGENT_CREDENTIAL"
MANAGED = "FLEETLOG_SCALER_MANAGED"


@dataclass(frozen=True, kw_only=True)
class RenewedToken:
    """A new token for a key that the agent already has. The token is a secret."""

    jwt: str = field(repr=False)
    ends_at: datetime


@dataclass(frozen=True, kw_only=True)
class NatsAgentAccess:
    """Mints what agents connect with; keeps nothing, so a restarted coordinator, or another one, renews as well.

    `nats_url` is how machines reach NATS, which differs by network: one access per scaler. `signer` None means
    that no agent can be let in. With `bearer` the token alone connects, for guests that cannot sign.
    """

    cluster: str
    nats_url: str
    clock: Clock
    signer: AccountSigner | None
    ttl_s: float = TTL_S
    bearer: bool = False

    def environment(self, vm: str, labels: tuple[str, ...]) -> Mapping[str, str]:
        """Return what the agent of `vm` needs to reach us as itself and as nobody else.

        `FLEETLOG_AGENT_CREDENTIAL` is the text of a NATS creds file, or a token alone when it is a bearer's.

        Raises:
            Refused: no signing key (code `no-signing-key`).
        """
        issued_at = self.clock.now()
        publish, subscribe = _rights(self.cluster, vm)
        made = self._signer().mint(
            name=f"agent {vm}",
            issued_at=issued_at,
            expires_at=issued_at + timedelta(seconds=self.ttl_s),
            publish=publish,
            subscribe=subscribe,
            bearer=self.bearer,
        )
        return {
            ID: vm,
            CLUSTER: self.cluster,
            NATS_URL: self.nats_url,
            LABELS: ",".join(labels),
            CREDENTIAL: made.jwt if self.bearer else made.creds_text(),
            MANAGED: "1",
        }

    def due(self, ends_at: datetime) -> bool:
        """Tell whether a credential that ends then should be renewed now."""
        left_s = (ends_at - self.clock.now()).total_seconds()
        return left_s <= self.ttl_s * (1 - RENEW_AFTER)

    def renew(self, vm: str, public_key: str) -> RenewedToken:
        """Return a new token for whoever speaks as `vm` and says that this is its key.

        The key need not be proven: the token says no more than the one it replaces, which is to speak as `vm`.

        Raises:
            Refused: no signing key (code `no-signing-key`).
            CredentialError: that is no user's public key.
        """
        issued_at = self.clock.now()
        ends_at = issued_at + timedelta(seconds=self.ttl_s)
        publish, subscribe = _rights(self.cluster, vm)
        made = self._signer().mint(
            name=f"agent {vm}",
            issued_at=issued_at,
            expires_at=ends_at,
            user_public=public_key,
            publish=publish,
            subscribe=subscribe,
            bearer=self.bearer,
        )
        return RenewedToken(jwt=made.jwt, ends_at=ends_at)

    def _signer(self) -> AccountSigner:
        if self.signer is None:
            raise Refused(
                "no-signing-key",
                "agents need credentials and this NATS is not ours: give `--agent-signing-key FILE`, a file with the "
                "seed (SA...) of a signing key of the account, or run without `--nats` for an embedded server",
            )
        return self.signer


def _rights(cluster: str, vm: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    publish = (subjects.agent_everything(cluster, vm),)
    subscribe = (subjects.agent_command(cluster, vm), f"{subjects.agent_inbox(vm)}.>")
    return publish, subscribe

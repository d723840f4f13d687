"""What has happened to one claim code. Its aggregate is the hash of the code, which is in `scale.up` and nowhere else."""

from datetime import datetime

from events.envelope import Event


class ClaimRegistered(Event, frozen=True, kw_only=True, tag="claim.registered"):
    """Whoever knows the code may become the agent of `vm`, once, until `expires_at`; in the batch of `scale.up`."""

    vm: str
    scaler: str
    labels: tuple[str, ...]  # what the agent registers with
    nats_url: str
    expires_at: datetime


class ClaimRedeemed(Event, frozen=True, kw_only=True, tag="claim.redeemed"):
    """The code is spent. Stored before a credential is minted, and for this key alone."""

    vm: str
    public_key: str  # the user nkey (`U...`) that the redeemer made and holds the seed of


ClaimEvent = ClaimRegistered | ClaimRedeemed

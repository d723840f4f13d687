"""What provisioners are told: start a machine, end a machine. The public contract, and facts like any others.

One fact per target, stored in the batch of the transition that caused it: what the log says of a machine and what its
provisioner is told cannot differ. Read with a durable consumer on the log, in the order of the log; see `fleetlog contract`.
"""

from datetime import datetime
from typing import Literal

from events.envelope import Event, Resources
from events.vm import Reason

CONTRACT = 1
"""The version of the contract: a consumer may rely on every field of it for as long as the number stays."""


class Up(Event, frozen=True, kw_only=True, tag="scale.up"):
    """Start one machine, whose agent is to register as `agent` with all of `labels`.

    To be answered with `accepted` or `failed` until `answer_by`. `request_id` is the idempotency key: the same one never
    means a second machine. `claim_code` is a secret: whoever has it first becomes the agent. It is used once, until
    `claim_expires_at`.
    """

    contract: Literal[1] = 1
    request_id: str
    agent: str
    scaler: str
    target: str
    cluster: str
    labels: tuple[str, ...]
    mandatory_labels: tuple[str, ...] = ()  # what a job must ask for before this agent may take it
    resources: Resources = Resources()  # zero: undeclared
    nats_url: str  # where the machine reaches NATS
    claim_code: str
    claim_expires_at: datetime
    answer_by: datetime
    job: str | None = None
    run: str | None = None


class Down(Event, frozen=True, kw_only=True, tag="scale.down"):
    """End the machine of this agent, whoever started it and whether or not it was ever started.

    To be answered with `terminated` once nothing of it is left, until `answer_by`; then it is offered again, with the
    same `request_id` and the next `offer`. Never stored before the machine's `scale.up`.
    """

    contract: Literal[1] = 1
    request_id: str
    agent: str
    scaler: str
    target: str
    cluster: str
    reason: Reason
    offer: int  # counts from 1
    answer_by: datetime
    reference: str = ""  # what the answer `accepted` named the machine


ScaleEvent = Up | Down

"""One example of each message of the contract, as the documents and `PROVISIONERS.md` show them."""

from datetime import UTC, datetime

from events import subjects
from events.envelope import Resources
from events.scale import Down, Up
from infra.api.messages import DoneAnswer, failure
from infra.claims.messages import RedeemAnswer, RedeemRequest
from infra.provision.messages import ProvisionReport
from infra.provision.schemas import DownFact, UpFact

AGENT = "a-01m8qe4jaaxtq0j3jkap0qwzzx"
SCALER = "cloud"
TARGET = "acme-infra"
CLUSTER = "default"
NATS_URL = "tls://nats.example.com:4222"
LABELS = ("linux", "large")

UP = UpFact(
    aggregate=subjects.scale_up(TARGET, SCALER, AGENT),
    version=1,
    at=datetime(2026, 12, 1, 8, 30, 15, 250_000, UTC),
    writer="alpha",
    cause="demand:0d63005927954094133227046b375b3e",
    correlation="0d63005927954094133227046b375b3e",
    attempt="4f1c0a7d9b3e5f62a8c4d1e07b95f3aa",
    event=Up(
        request_id=f"{AGENT}.up",
        agent=AGENT,
        scaler=SCALER,
        target=TARGET,
        cluster=CLUSTER,
        labels=LABELS,
        mandatory_labels=("large",),
        resources=Resources(cpus=4, memory_bytes=8 << 30),
        nats_url=NATS_URL,
        claim_code="0123456789abcdef" * 4,
        claim_expires_at=datetime(2026, 12, 1, 8, 35, 15, 250_000, UTC),
        answer_by=datetime(2026, 12, 1, 8, 35, 15, 250_000, UTC),
        job="build-17",
        run="7",
    ),
)
DOWN = DownFact(
    aggregate=subjects.scale_down(TARGET, SCALER, AGENT),
    version=1,
    at=datetime(2026, 12, 1, 9, 2, 40, 500_000, UTC),
    writer="alpha",
    cause="agent:1ddb0526ecf74c0f8f7c5a2f0b6f3d11",
    correlation="0d63005927954094133227046b375b3e",
    attempt="c2e9b7104d8f36a5917e0c3bd46fa258",
    event=Down(
        request_id=f"{AGENT}.down",
        agent=AGENT,
        scaler=SCALER,
        target=TARGET,
        cluster=CLUSTER,
        reason="job-complete",
        offer=1,
        answer_by=datetime(2026, 12, 1, 9, 12, 40, 500_000, UTC),
        reference="i-0abc123",
    ),
)
ACCEPTED = ProvisionReport(agent=AGENT, verdict="accepted", reference="i-0abc123")
FAILED = ProvisionReport(agent=AGENT, verdict="failed", detail="no such machine type", permanent=True)
TERMINATED = ProvisionReport(agent=AGENT, verdict="terminated", detail="i-0abc123 is deleted")
DONE = DoneAnswer(coordinator="alpha")
NOT_YOURS = failure(
    "not-yours", f"agent {AGENT} was not offered to {TARGET}: only its own targets answer for it"
)
REDEEM = RedeemRequest(
    code=UP.event.claim_code, public_key="UAMFE2OIW3JDXIIDABGSVSBZWLGLLEBFIZ56EOQJ2MLPTXNZE5ASKH5N"
)
REDEEMED = RedeemAnswer(
    agent=AGENT,
    cluster=CLUSTER,
    labels=LABELS,
    nats_url=NATS_URL,
    jwt="eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.e30.AA",
    ends_at=1796117700,
)
SPENT = failure("claim-consumed", "this claim code was redeemed before, for another key")

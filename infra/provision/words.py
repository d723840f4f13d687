"""The public contract in words: what the documents say beside the schemas, for people who write a provisioner."""

FIELDS = {
    "aggregate": "what the fact belongs to; the subject ends with it",
    "version": "the version of the message's form; 1 when it is left out",
    "at": "when the writer decided, by its clock",
    "writer": "the coordinator that wrote the fact: for people, never to route by",
    "cause": "the command or fact that led to this one",
    "correlation": "the first cause of the chain",
    "attempt": "a random id of the decision; not an idempotency key",
    "event": "what has happened",
    "epoch": "of the leader, for facts that only a leader may write; else 0",
    "tag": "what kind of event this is; the header Fleetlog-Tag repeats it",
    "contract": "the version of this contract",
    "request_id": "the idempotency key: the same one never means a second piece of work",
    "agent": "the agent's id, which is its machine's: tag the machine with it; never used again",
    "scaler": "the scaler of the fleet file that wants the machine; with `agent`, what to route on",
    "target": "the provisioner that is meant; the subject names it too",
    "cluster": "the fleetlog cluster",
    "labels": "what the agent registers with",
    "mandatory_labels": "what a job must ask for before this agent may take it",
    "resources": "what the machine should have at least; a part that is missing or zero is undeclared",
    "cpus": "cores; zero is undeclared",
    "memory_bytes": "bytes of memory; zero is undeclared",
    "nats_url": "where the machine reaches NATS",
    "claim_code": "a secret: whoever shows it first becomes the agent; for the machine and nobody else",
    "claim_expires_at": "from then on the claim code is refused",
    "answer_by": "when fleetlog stops waiting for the answer",
    "job": "the job the machine is wanted for, when it is for one",
    "run": "the run of that job",
    "reason": "why it ends: for people and counting; every reason means the same work, and there may be new ones",
    "offer": "how often this end has been told to this target, counted from 1",
    "reference": "what the provisioner named the machine in `accepted`; empty when none was noted",
    "verdict": "what became of the machine",
    "detail": "for people: at most 2000 characters, of which the log keeps 400",
    "permanent": "with `failed`: trying again would fail as well",
    "done": "the answer is in the log",
    "coordinator": "the coordinator that answers: for people",
    "error": "why it was refused, or could not be carried out",
    "code": "stable and for machines; one that is not known is to be treated as `internal`",
    "message": "one sentence with the way out, for people",
    "public_key": "the public half of a user nkey that the machine has just made; the seed stays on the machine",
    "jwt": "a NATS user token for that key: connect with it and the seed",
    "ends_at": "when the token ends, in seconds since 1970; the agent is given a new one before",
}
"""What a field means, in whatever message it stands, unless the struct or `FIELDS_OF` says more."""

FIELDS_OF = {
    ("UpFact", "version"): "the fact's place in its aggregate, counted from 1",
    ("DownFact", "version"): "the fact's place in its aggregate, counted from 1; one more with each offer",
    ("RedeemAnswer", "agent"): "the id the machine registers with",
    ("RedeemRequest", "code"): "the claim code of `scale.up`: 64 hex digits",
}


def described(kind: str, field: str) -> str:
    """Return what a field means; KeyError for one that nobody has described."""
    return FIELDS_OF.get((kind, field)) or FIELDS[field]


OVERVIEW = """\
fleetlog decides which cloud machines there should be. A *provisioner* starts and ends them. A *machine* exchanges its
claim code for a credential and registers as an agent. All three meet in NATS; all messages are JSON, one object each.

**Read.** Every wish is a fact in one JetStream stream, the log. A provisioner needs one durable pull consumer on it,
with explicit acknowledgement and no limit of deliveries. Nothing else has to be subscribed to, and nothing is sent
beside the stream: what is stored is delivered.

- stream: `{stream}`, which is `FLEETLOG_` and the cluster's name in capitals, with `_` for `-`
- filter: `{filter}`
- consumer: `{consumer}`, one for a target, however many processes share it

**Order.** All facts of one agent come in the order of the stream, and its `scale.down` is never stored before its
`scale.up`. Handle the facts of one agent in that order, one at a time; facts of different agents may be handled side by
side. A redelivery can still bring a `scale.up` after its `scale.down`: before answering `terminated`, note durably that
the agent was ended, and start nothing for an agent that was.

**Delivery is at least once.** JetStream delivers again what was not acknowledged within the consumer's `ack_wait`, and
after any lost acknowledgement. `request_id` is the idempotency key, within the target: `<agent>.up` never means a
second machine, and `<agent>.down` is done again without harm. A `scale.down` that was not answered with `terminated` by
`answer_by` is stored once more, as a new message with the same `request_id` and the next `offer`, without end.

**Answer** as a NATS request, and acknowledge the message only after `done`: then the answer is in the log. Repeating an
answer does no harm.

- subject: `{provision}`
- `scale.up`: `accepted` or `failed`, until `answer_by`. Look for the machine by the agent's id first: if it is there,
  answer `accepted` again. If it is not, and `answer_by` has passed or the agent was ended, start nothing and answer
  `failed`. Without an answer and without its agent, the life ends with `spawn-timeout`, and a `scale.down` follows.
- `scale.down`: `terminated`, once nothing of the machine is left, also when there never was one.

**The end.** A teardown is over when the provisioner has confirmed it with `terminated`, or an operator has said so in
its place. Until then the machine is counted, keeps its slot, and its `scale.down` is offered again. After `failed`,
too, a `scale.down` comes and is to be answered.

**Route** on (`scaler`, `agent`), never on who emitted: a `scale.down` may be written by another coordinator than the
`scale.up`.

**What is not known.** Ignore unknown fields. Treat an unknown `reason` as any other. Terminate a message with an
unknown `tag` or another `contract` (JetStream's `+TERM`) and tell your operator: delivered again it would be no better
known.

**Versions.** This is contract 1, named in every event as `contract`. Within it fields only get added, and those that
are there keep name, type and meaning. Anything else is a new number. Requests are read strictly: send only fields that
the schema has.

**Secrets.** The claim code is the only one. It is used once, until `claim_expires_at`; hand it to the machine and keep
it out of logs, tags and names.
"""

ACCEPTANCE = """\
`accepted`: a machine is on its way; say it as soon as the provider has taken the order. The agent must register within
the scaler's `register_timeout_s` from then on. The first `accepted` counts; one that comes when the agent has
registered already, or when its life is over, changes nothing.

`failed`: there will be none, or the one that was accepted never came up. With `permanent`, trying again would fail as
well. `detail` says why. Of several targets one that fails ends nothing: another may still bring the machine up.

`terminated`: nothing of the machine is left, if there ever was anything. It may also be said unasked, when the provider
took a machine away.

`done` means that the answer is in the log, or that the log needs it no more: acknowledge the message. An error has a
code:

| code | what it means | repeat the answer? |
| --- | --- | --- |
| `malformed` | no answer of this form; the message names the field | no: correct the provisioner |
| `unknown-agent` | no machine with this id was ever requested in this cluster | no: acknowledge, tell your operator |
| `not-yours` | the machine was never offered to this target | no: acknowledge, tell your operator |
| `ended` | the machine's life was over in this very moment | yes, after a second |
| `log-unavailable` | the log cannot be read or written now, or the coordinator has just started | yes, after a pause |
| `log-full` | the log has no room | yes, after a minute; an operator must give it room |
| `conflict` | another writer came in between, again and again | yes |
| `timeout` | not stored in time; it may still be | yes |
| `overloaded` | too many requests wait for the coordinator | yes, after a second |
| `internal` | a bug in fleetlog; its own log has the trace | yes, with growing pauses; tell your operator |

No answer at all means that the coordinator of this machine is away: repeat, with growing pauses. Others hear the
request too and leave it to that one.
"""

REDEMPTION = """\
A machine connects with the bootstrap credential, which may do this and nothing else, and shows its claim code with the
public key of a user nkey it has just made. The answer may be overheard by other machines: it is of use only with the
key's seed. The machine then connects with `jwt` and the seed, to `nats_url`, and registers as `agent`. Any coordinator
answers. An error has a code:

| code | what it means | repeat? |
| --- | --- | --- |
| `malformed` | no request of this form; the message names the field | no |
| `invalid-claim` | there is no such claim code | no: the machine should end |
| `claim-consumed` | the code is spent, for another key | no: another machine is the agent; this one should end |
| `claim-expired` | too late | no: the machine should end |
| `ended` | the agent's life is over | no: the machine should end |
| `no-signing-key` | the coordinator cannot make credentials | yes, with the same key; an operator must give it a key |
| `log-unavailable`, `log-full`, `conflict`, `timeout`, `overloaded`, `internal` | as for a provisioner's answers | yes, with the same key |

The code is spent before the credential is made. When the answer is lost, ask again with the same key.
"""

UP = """\
Start one machine, which is to redeem `claim_code` at `nats_url`; see `redeem`. To be answered with `accepted` or
`failed` until `answer_by`.
"""

DOWN = """\
End the machine of this agent, whoever started it and whether or not it was ever started: look for it by the agent's id;
`reference` is there when it is known. To be answered with `terminated`, once nothing of it is left, until `answer_by`;
then it is offered again.
"""

PARAMETERS = {
    "cluster": "the name of the fleetlog cluster: 1 to 63 lowercase letters, digits and dashes",
    "target": "the provisioner, as `provisioning_targets` of the scaler names it: 1 to 63 of the same",
    "scaler": "the scaler that wants the machine: 1 to 63 of the same",
    "agent": "the agent's id, which is its machine's: 1 to 64 of the same",
}
"""What the braces in subjects stand for; each is one token."""

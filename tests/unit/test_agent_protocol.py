"""The agents' messages: their bounds, their form, and what a newcomer is told about them."""

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import Refused
from infra.agent.access import CREDENTIAL, NatsAgentAccess
from infra.agent.allowance import Allowance, Rate
from infra.agent.bootstrap import BootstrapError, read_bootstrap
from infra.agent.output import LineBuffer, LineSplitter
from infra.agent.protocol import (
    BYTES_MAX,
    LINE_CHARACTERS_MAX,
    LINES_MAX,
    VERBS,
    Accepted,
    Beat,
    Config,
    Declined,
    Logs,
    Malformed,
    Noted,
    Register,
    Renew,
    Stop,
    Verb,
    contract,
    encode,
    read_answer,
    read_command,
    read_from_agent,
)
from infra.credentials import ACCOUNT, AccountSigner, new_seed, public_key, read_claims

SESSION = "0123456789abcdef" * 2
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


class StandingClock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.wall = NOW
        self.steady_s = 0.0

    def now(self) -> datetime:
        return self.wall

    def monotonic_s(self) -> float:
        return self.steady_s


def access(*, signed: bool = True, bearer: bool = False) -> NatsAgentAccess:
    seed = new_seed(ACCOUNT)
    signer = AccountSigner(seed=seed, account_public=public_key(seed)) if signed else None
    return NatsAgentAccess(
        cluster="main", nats_url="nats://127.0.0.1:1", clock=StandingClock(), signer=signer, bearer=bearer
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b'{"session":"short"}',
        b'{"session":7}',
        b'{"protocol":"1","session":"%b"}' % SESSION.encode(),
        b'{"session":"%b","public_key":"SUAPRIVATE"}' % SESSION.encode(),
        b"[" * 5000,
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_malformed_message_is_refused_and_nothing_else_is_raised(verb: Verb, payload: bytes) -> None:
    if verb in ("acked", "logs", "done") and b"public_key" in payload:
        assert (
            read_from_agent(verb, payload).session == SESSION
        )  # a field of somebody else is none of their business
        return
    with pytest.raises(Malformed):
        read_from_agent(verb, payload)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_the_reader_fail_in_another_way(payload: bytes) -> None:
    for verb in VERBS:
        with contextlib.suppress(Malformed):
            read_from_agent(verb, payload)


def test_a_message_over_its_bound_is_refused_before_it_is_read() -> None:
    for verb in VERBS:
        with pytest.raises(Malformed, match="at most"):
            read_from_agent(verb, b" " * (BYTES_MAX[verb] + 1))


def test_a_later_protocol_is_named_as_the_reason_whatever_its_form() -> None:
    with pytest.raises(Malformed, match="protocol 2 is spoken there and 1 here") as caught:
        read_from_agent("register", b'{"protocol":2,"who":"me"}')
    assert caught.value.code == "unsupported-protocol"


def test_an_unknown_field_is_ignored_so_that_fields_can_be_added() -> None:
    beat = read_from_agent("beat", b'{"session":"%b","mood":"good"}' % SESSION.encode())
    assert beat == Beat(session=SESSION)


def test_the_largest_batch_of_the_worst_lines_passes_the_door() -> None:
    buffer = LineBuffer()
    buffer.add([b"\x00" * 500] * 2000)  # six characters each as JSON
    lines, _ = buffer.take(lines_max=LINES_MAX, bytes_max=32 * 1024)
    payload = encode(Logs(session=SESSION, lines=lines))
    assert len(payload) > 6 * 31 * 1024
    assert read_from_agent("logs", payload) == Logs(session=SESSION, lines=lines)


def test_answers_and_commands_come_back_as_they_were_sent() -> None:
    for answer in (
        Accepted(vm="a", beat_every_s=5.0),
        Noted(),
        Declined(code="unknown-agent", message="no"),
        Declined(code="log-full", message="later", retry_after_s=1.0),
    ):
        assert read_answer(encode(answer)) == answer
    for command in (Config(beat_every_s=5, job="j"), Stop(reason="drain", grace_s=1.5), Renew(jwt="x.y.z")):
        assert read_command(encode(command)) == command


def test_the_contract_has_a_schema_for_every_message_and_resolves_every_reference() -> None:
    text = json.dumps(contract())
    told = json.loads(text)
    assert set(told["agent_publishes"]) == set(VERBS)
    assert told["agent_publishes"]["register"]["subject"] == "fleetlog.<cluster>.agent.<id>.register"
    names = {form.__name__ for form in (Register, Beat, Logs, Accepted, Noted, Declined, Config, Stop, Renew)}
    assert names <= set(told["definitions"])
    assert all(told["definitions"][name].get("description") for name in names)
    referenced = {part.split('"')[0] for part in text.split("#/definitions/")[1:]}
    assert referenced <= set(told["definitions"])


def test_an_agents_token_speaks_on_its_own_subjects_only_and_ends_after_an_hour() -> None:
    environment = access().environment("vm-1", ("linux", "kvm"))
    told = read_bootstrap(environment)
    claims = read_claims(told.credential.jwt)
    assert claims["nats"]["pub"] == {"allow": ["fleetlog.main.agent.vm-1.>"]}
    assert claims["nats"]["sub"] == {"allow": ["fleetlog.main.command.vm-1", "_INBOX_agent_vm-1.>"]}
    assert claims["exp"] == (NOW + timedelta(hours=1)).timestamp() == told.credential_ends_at
    assert (told.id, told.cluster, told.labels) == ("vm-1", "main", ("linux", "kvm"))
    assert environment["FLEETLOG_SCALER_MANAGED"] == "1"


def test_a_bearers_credential_is_the_token_alone() -> None:
    environment = access(bearer=True).environment("vm-1", ())
    assert "BEGIN" not in environment[CREDENTIAL]
    assert read_bootstrap(environment).credential.seed is None


def test_a_renewed_token_gives_a_foreign_key_no_more_than_to_speak_as_the_same_machine() -> None:
    somebody = access().environment("vm-2", ())
    key = read_bootstrap(somebody).credential.public_key
    renewed = access().renew("vm-1", key)
    claims = read_claims(renewed.jwt)
    assert claims["sub"] == key
    assert claims["nats"]["pub"] == {"allow": ["fleetlog.main.agent.vm-1.>"]}
    assert renewed.jwt not in repr(renewed)


def test_a_credential_is_due_for_renewal_before_two_thirds_of_its_life() -> None:
    ours = access()
    assert not ours.due(NOW + timedelta(seconds=3599))
    assert ours.due(NOW + timedelta(seconds=3600 / 3 + 1))
    assert ours.due(NOW - timedelta(seconds=1))


def test_without_a_signing_key_agents_are_refused_with_the_way_out() -> None:
    with pytest.raises(Refused, match="--agent-signing-key FILE") as caught:
        access(signed=False).environment("vm-1", ())
    assert caught.value.code == "no-signing-key"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FLEETLOG_AGENT_ID": ""}, "--id"),
        ({"FLEETLOG_AGENT_ID": "a.b"}, "agent id 'a.b'"),
        ({"FLEETLOG_CLUSTER": "A>"}, "cluster"),
        ({"FLEETLOG_NATS_URL": "http://x"}, "nats://HOST:PORT"),
        ({"FLEETLOG_AGENT_CREDENTIAL": ""}, "--credential-file"),
        ({"FLEETLOG_AGENT_CREDENTIAL": "nonsense"}, "creds file"),
    ],
)
def test_a_bootstrap_that_is_not_enough_is_refused_naming_what_is_missing(
    change: Mapping[str, str], words: str
) -> None:
    environment = dict(access().environment("vm-1", ()))
    with pytest.raises(BootstrapError, match=words) as caught:
        read_bootstrap(environment | dict(change))
    assert "SEED" not in str(caught.value)


def test_a_token_that_needs_its_seed_is_refused_without_it() -> None:
    environment = dict(access().environment("vm-1", ()))
    token = read_bootstrap(environment).credential.jwt
    with pytest.raises(BootstrapError, match="without its seed") as caught:
        read_bootstrap(environment | {CREDENTIAL: token})
    assert token not in str(caught.value)


def test_a_credential_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    environment = dict(access().environment("vm-1", ()))
    file = tmp_path / "agent.creds"
    file.write_text(environment.pop(CREDENTIAL))
    file.chmod(0o644)
    with pytest.raises(BootstrapError, match="chmod 600"):
        read_bootstrap(environment, credential_file=file)
    file.chmod(0o600)
    assert read_bootstrap(environment, credential_file=file).id == "vm-1"


def test_the_line_buffer_keeps_the_newest_lines_and_counts_the_lost_ones() -> None:
    buffer = LineBuffer(lines_max=3, bytes_max=100)
    buffer.add([b"%d" % number for number in range(10)])
    assert buffer.take(lines_max=10, bytes_max=100) == (("7", "8", "9"), 7)
    buffer.add([b"x" * 60, b"y" * 60])
    assert buffer.take(lines_max=10, bytes_max=100) == (("y" * 60,), 1)
    assert buffer.take(lines_max=10, bytes_max=100) == ((), 0)


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc\nd", b"e\r\n", b""]), max_size=30))
def test_lines_are_the_same_however_the_stream_was_cut_into_chunks(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    splitter = LineSplitter(buffer)
    for chunk in chunks:
        splitter.feed(chunk)
    splitter.end()
    whole = b"".join(chunks)
    expected = [line.removesuffix(b"\r").decode() for line in whole.split(b"\n")]
    if expected[-1] == "":
        expected.pop()
    assert list(buffer.take(lines_max=1000, bytes_max=10_000)[0]) == expected


def test_a_line_too_long_is_cut_and_the_next_one_is_whole() -> None:
    buffer = LineBuffer()
    splitter = LineSplitter(buffer)
    for _ in range(100):
        splitter.feed(b"z" * 1000)
    splitter.feed(b"\nok\n")
    lines, dropped = buffer.take(lines_max=10, bytes_max=100_000)
    assert dropped == 0
    assert len(lines) == 2
    assert len(lines[0]) <= LINE_CHARACTERS_MAX
    assert lines[0].endswith(" [cut]")
    assert lines[1] == "ok"


def test_lines_over_the_rate_are_left_out_and_told_with_the_next_that_pass() -> None:
    clock = StandingClock()
    allowance = Allowance(clock.monotonic_s, Rate(lines_per_s=2, lines_at_once=3))
    assert allowance.admit("a", ("1", "2", "3", "4", "5"), 0) == (("1", "2", "3"), 0)
    assert allowance.admit("a", ("6",), 10) == ((), 0)
    assert allowance.admit("b", ("1",), 0) == (("1",), 0), "another agent has a rate of its own"
    clock.steady_s = 0.5
    assert allowance.admit("a", ("7", "8"), 0) == (("7",), 2 + 1 + 10)
    clock.steady_s = 10
    assert allowance.admit("a", ("9",), 0) == (("9",), 1)


def test_the_allowance_remembers_a_bounded_number_of_agents() -> None:
    allowance = Allowance(StandingClock().monotonic_s, agents_max=5)
    for number in range(100):
        allowance.admit(f"vm-{number}", ("x",), 0)
    assert len(allowance._buckets) == 5

"""The request API over a real NATS: every answer, every refusal, and what happens when it is too much."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.commands import Answer, Demand, RemoveAgent, SetGate
from actors.errors import Conflict, LogFull, LogUnavailable, Refused
from events import subjects
from infra.api.client import ApiClient, ApiRefused, NoCoordinator
from infra.api.messages import (
    VERBS,
    DemandRequest,
    GateRequest,
    LogsRequest,
    MatchRequest,
    Needs,
    RemoveRequest,
    json_schema,
)
from tests.conftest import NatsServer
from tests.integration.api_site import SMALL_STATUS, ApiSite

SPAWNING = Answer(kind="spawning", vm="a-1", scaler="small", backend="scripted")


@pytest.fixture
def site(nats_server: NatsServer) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    yield site
    site.close()


@pytest.fixture
def client(site: ApiSite) -> ApiClient:
    return ApiClient(site.connection, site.cluster)


def raw(site: ApiSite, verb: str, payload: bytes) -> dict[str, object]:
    subject = subjects.api_of(site.cluster, "alpha", verb)
    answer: dict[str, object] = json.loads(site.connection.request(subject, payload, 5))
    return answer


def test_a_demand_reaches_the_front_door_whole_and_comes_back_with_one_answer_each(
    site: ApiSite, client: ApiClient
) -> None:
    refusal = Answer(kind="at-capacity", message="3 of 3 agents", cap="scaler-agents")
    site.door.answers = (SPAWNING, refusal)
    with site.serving():
        answer = client.demand(
            DemandRequest(
                labels=("linux",),
                exclude=("gpu",),
                count=2,
                run="r1",
                limits=Needs(cpus=2),
                by="ci",
                id="demand-1",
            )
        )
    asked = site.door.asked[0]
    assert isinstance(asked, Demand)
    assert (asked.id, asked.labels, asked.exclude, asked.count, asked.run) == (
        "demand-1",
        ("linux",),
        ("gpu",),
        2,
        "r1",
    )
    assert (asked.limits.cpus, asked.by) == (2, "ci")
    assert answer.answers == (SPAWNING, refusal)
    assert answer.coordinator == "alpha"


def test_a_demand_without_an_id_gets_one_and_each_another(site: ApiSite, client: ApiClient) -> None:
    site.door.answers = (SPAWNING,)
    with site.serving():
        first, second = (client.demand(DemandRequest(labels=("x",))).demand for _ in range(2))
    assert first != second
    assert [asked.id for asked in site.door.asked if isinstance(asked, Demand)] == [first, second]


def test_every_other_verb_reaches_its_method(site: ApiSite, client: ApiClient) -> None:
    site.door.lines = ("one", "two", "three")
    with site.serving():
        client.remove("alpha", RemoveRequest(agent="a-1", force=True, by="ann"))
        client.set_gate("alpha", GateRequest(scaler="small", gate="paused", by="ann"))
        assert client.logs("alpha", LogsRequest(agent="a-1", lines=2)).lines == ("two", "three")
        assert client.scalers("alpha") == (SMALL_STATUS,)
        assert client.status("alpha").pid == 7
        assert client.verify_host("alpha").differences == ()
        (verdict,) = client.match("alpha", MatchRequest(labels=("linux",)))
    assert verdict.verdict == "chosen"
    assert site.door.asked[:2] == [
        RemoveAgent(vm="a-1", by="ann", force=True),
        SetGate(scaler="small", gate="paused", by="ann"),
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("busy", "its agent is busy"), "busy"),
        (Conflict("others were faster"), "conflict"),
        (LogFull("full"), "log-full"),
        (LogUnavailable("gone"), "log-unavailable"),
        (TimeoutError("slow"), "timeout"),
        (ZeroDivisionError("a bug"), "internal"),
    ],
)
def test_whatever_goes_wrong_is_an_answer_with_a_code(
    site: ApiSite, client: ApiClient, error: Exception, code: str
) -> None:
    site.door.error = error
    with site.serving() as door:
        with pytest.raises(ApiRefused) as caught:
            client.remove("alpha", RemoveRequest(agent="a-1"))
        assert caught.value.code == code
        assert door.counts()["agent.rm", code] == 1
        site.door.error = None
        client.remove("alpha", RemoveRequest(agent="a-1"))


def test_a_bug_does_not_tell_its_secrets_to_whoever_asked(site: ApiSite, client: ApiClient) -> None:
    site.door.error = RuntimeError("password hunter2")
    with site.serving(), pytest.raises(ApiRefused) as caught:
        client.remove("alpha", RemoveRequest(agent="a-1"))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "payload", "told"),
    [
        ("demand", b'{"labels": "linux"}', "labels"),
        ("demand", b'{"labels": ["two words"]}', "labels[0]"),
        ("demand", b'{"labels": ["' + b"x" * 129 + b'"]}', "labels[0]"),
        ("demand", b'{"count": 0}', "count"),
        ("demand", b'{"count": 101}', "count"),
        ("demand", b'{"count": 1.5}', "count"),
        ("demand", b'{"cuont": 1}', "cuont"),
        ("demand", b'{"job": ""}', "job"),
        ("demand", b'{"id": "UPPER-CASE"}', "id"),
        ("demand", b'{"limits": {"cpus": -1}}', "limits.cpus"),
        ("demand", b'{"limits": {"cpu": 1}}', "limits.cpu"),
        ("demand", b'{"version": 2}', "version 1"),
        ("demand", b"[]", "object"),
        ("demand", b"{", "not JSON"),
        ("demand", b"\xff\xfe", "not JSON"),
        ("demand", b"[" * 60_000, "object"),
        ("demand", b'{"run": "' + b"x" * 70_000 + b'"}', "at most 65536"),
        ("agent.rm", b"{}", "agent"),
        ("agent.rm", b'{"agent": "../etc"}', "agent"),
        ("agent.logs", b'{"agent": "a", "lines": 0}', "lines"),
        ("scaler.gate", b'{"scaler": "s", "gate": "shut"}', "gate"),
        ("scaler.gate", b'{"scaler": "S", "gate": "open"}', "scaler"),
    ],
)
def test_a_malformed_request_is_refused_naming_the_field(
    site: ApiSite, verb: str, payload: bytes, told: str
) -> None:
    with site.serving():
        answer = raw(site, verb, payload)
    error = answer["error"]
    assert isinstance(error, dict)
    assert error["code"] == "malformed"
    assert told in error["message"]
    assert site.door.asked == []


def test_an_empty_request_is_one_with_nothing_but_defaults(site: ApiSite) -> None:
    with site.serving():
        assert raw(site, "status", b"")["coordinator"] == "alpha"


def test_log_lines_that_do_not_fit_lose_their_oldest_and_say_so(site: ApiSite, client: ApiClient) -> None:
    site.door.lines = tuple(f"{number} " + "\x1b" * 1000 for number in range(1000))
    with site.serving():
        answer = client.logs("alpha", LogsRequest(agent="a-1", lines=1000))
    assert answer.lines[-1].startswith("999 ")
    assert answer.cut == 1000 - len(answer.lines) > 0


def test_nobody_there_is_not_the_same_as_no_answer_in_time(site: ApiSite, client: ApiClient) -> None:
    with pytest.raises(NoCoordinator, match="fleetlog up"):
        client.demand(DemandRequest(labels=("x",)))
    site.door.hold.clear()
    with site.serving(), pytest.raises(TimeoutError, match="may still take effect"):
        client.remove("alpha", RemoveRequest(agent="a-1"), timeout_s=0.2)


def test_more_than_the_door_holds_are_told_to_ask_again_and_status_still_answers(
    site: ApiSite, client: ApiClient
) -> None:
    site.door.hold.clear()
    with site.serving(threads=1, waiting_max=1), ThreadPoolExecutor(8) as pool:
        overloaded = threading.Event()

        def ask(_: int) -> str:
            try:
                client.remove("alpha", RemoveRequest(agent="a-1"))
            except ApiRefused as refused:
                overloaded.set()
                return refused.code
            return "done"

        asking = [pool.submit(ask, number) for number in range(8)]
        assert overloaded.wait(10)
        assert client.status("alpha").coordinator == "alpha"
        site.door.hold.set()
        codes = [each.result(timeout=20) for each in asking]
    assert codes.count("overloaded") >= 5
    assert "done" in codes


def test_a_shared_demand_is_answered_by_one_of_two_coordinators(site: ApiSite, client: ApiClient) -> None:
    site.door.answers = (SPAWNING,)
    with site.serving(), site.serving():
        for _ in range(10):
            client.demand(DemandRequest(labels=("x",)))
    assert len(site.door.asked) == 10


def test_a_closed_door_serves_nobody(site: ApiSite, client: ApiClient) -> None:
    with site.serving():
        client.status("alpha")
    with pytest.raises(NoCoordinator):
        client.status("alpha")


def test_the_schema_has_every_verb_and_resolves_all_its_references() -> None:
    schema = json_schema()
    assert set(schema["verbs"]) == set(VERBS)
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert references <= set(schema["$defs"])
    assert schema["$defs"]["DemandRequest"]["properties"]["count"]["maximum"] == 100

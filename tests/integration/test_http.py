"""`/health` and `/metrics` over a real socket: what they answer, whom they outlast, and how fast they stop."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.message import Message
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from actors.ports import Headroom
from infra.clock import SystemClock
from infra.embedded.server_process import Status
from infra.http.health import Health, assess
from infra.http.server import CONNECTIONS_MAX, AddressRefused, HttpServer
from infra.metrics.fleet_metrics import FleetMetrics
from infra.metrics.lag import ViewLag
from projections.failures import ScalerFailures

LOG = Headroom(used_bytes=10, limit_bytes=100, demand_limit_bytes=90, facts=7, last_sequence=7)
RUNNING = Status(running=True, restarts=0, trouble=None)


def health(**changes: Any) -> Health:
    known: dict[str, Any] = {
        "coordinator": "alpha",
        "version": "1.2",
        "connected": True,
        "headroom": LOG,
        "views": [ViewLag(view="fleet", stage="live", sequence=7, lag_facts=0, lag_s=0)],
        "servers": {"nats": RUNNING},
        "failures": {},
    }
    return assess(**known | changes)


class Answered(NamedTuple):
    """One answer."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(address: str, path: str, method: str = "GET", **headers: str) -> Answered:
    request = urllib.request.Request(f"http://{address}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - http, to ourselves
            return Answered(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answered(error.code, error.headers, error.read())


class Site:
    """A server under test, whose health is whatever the test says."""

    def __init__(self) -> None:
        self.health: Callable[[], Health] = health
        self.registry = CollectorRegistry()
        self.metrics = FleetMetrics(
            self.registry, SystemClock(), coordinator="alpha", version="1.2", scalers={"small": "bare-metal"}
        )
        self.server = HttpServer("127.0.0.1:0", self._now, self.registry)
        self.address = self.server.start()

    def _now(self) -> Health:
        return self.health()


@pytest.fixture
def site() -> Iterator[Site]:
    """A server that runs."""
    site = Site()
    yield site
    assert site.server.stop()


def until(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not done():
        assert time.monotonic() < deadline_s, "not within the deadline"
        pause.wait(0.01)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


# What is answered.


def test_a_healthy_coordinator_answers_200_with_what_it_knows(site: Site) -> None:
    answer = ask(site.address, "/health")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    assert body["status"] == "ok"
    assert body["coordinator"] == "alpha"
    assert body["version"] == "1.2"
    assert body["connected"] is True
    assert body["log"]["last_sequence"] == 7
    assert [(view["view"], view["lag_facts"]) for view in body["views"]] == [("fleet", 0)]
    assert body["leader"] is None
    assert body["problems"] == []


PARKED = ViewLag(view="fleet", stage="parked", sequence=3, lag_facts=4, lag_s=9, reason="poison", parked_at=4)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"connected": False}, "not connected to NATS"),
        ({"headroom": None}, "the log has not answered lately"),
        (
            {
                "headroom": Headroom(
                    used_bytes=95, limit_bytes=100, demand_limit_bytes=90, facts=1, last_sequence=1
                )
            },
            "the log refuses demand",
        ),
        ({"views": [PARKED]}, "view fleet is parked at sequence 4: poison"),
        (
            {"servers": {"nats": Status(running=False, restarts=9, trouble="it died")}},
            "the embedded nats server does not run: it died",
        ),
    ],
)
def test_a_problem_answers_503_and_says_what_to_do(site: Site, changes: dict[str, Any], what: str) -> None:
    site.health = lambda: health(**changes)
    answer = ask(site.address, "/health")
    assert answer.status == 503
    assert answer.json["status"] == "degraded"
    (problem,) = answer.json["problems"]
    assert what in problem["what"]
    assert problem["do"]


def test_failing_agents_are_a_warning_without_their_details(site: Site) -> None:
    failing = ScalerFailures(
        scaler="small",
        backend="bare-metal",
        bound=1,
        unbound=2,
        last_detail="password=hunter2",
        last_at=datetime(2030, 1, 1, tzinfo=UTC),
    )
    site.health = lambda: health(failures={"small": failing})
    answer = ask(site.address, "/health")
    assert answer.status == 200
    assert "3 agents failed lately, 1 with a job waiting" in answer.json["warnings"][0]["what"]
    assert b"hunter2" not in answer.body


def test_a_health_check_that_raises_is_no_health(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Health:
        raise RuntimeError("secret detail")

    site.health = broken
    answer = ask(site.address, "/health")
    assert answer.status == 503
    assert answer.json["status"] == "degraded"
    assert b"secret detail" not in answer.body
    assert "secret detail" in caplog.text


def test_metrics_come_as_text_and_as_openmetrics_for_whoever_accepts_it(site: Site) -> None:
    plain = ask(site.address, "/metrics")
    assert plain.status == 200
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in parse_text(plain.body.decode())}
    assert "fleetlog_agents" in names
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    modern = ask(site.address, "/metrics", Accept=accept)
    assert modern.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(modern.body.decode())}  # type: ignore[no-untyped-call]
    assert "fleetlog_agents" in names
    assert modern.body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=x.y", ";;;,,=", "text/plain;version="]
)
def test_a_strange_accept_header_is_no_error(site: Site, accept: str) -> None:
    assert ask(site.address, "/metrics", Accept=accept).status == 200


def test_an_unknown_path_says_what_there_is(site: Site) -> None:
    for path in ("/", "/healthz", "/health/", "/metrics/x", "/" + "x" * 3000):
        answer = ask(site.address, path)
        assert answer.status == 404, path
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["paths"] == ["/health", "/metrics"]
        assert len(answer.body) < 500


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_nothing_but_reading_is_allowed(site: Site, path: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = ask(site.address, path, method)
        assert answer.status == 405, method
        assert sorted(answer.headers["allow"].split(", ")) == ["GET", "HEAD"]
        assert method in answer.json["error"]
    head = ask(site.address, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 100


def test_no_answer_names_the_server_and_no_request_is_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/health", "/metrics", "/nothing"):
        answer = ask(site.address, path)
        assert answer.headers["server"] is None
        assert answer.headers["cache-control"] == "no-store"
    assert [record for record in caplog.records if record.name.split(".")[0] != "asyncio"] == []


def test_other_pages_are_served_beside_and_listed() -> None:
    async def page(request: Request) -> Response:
        if request.query_params.get("broken"):
            raise RuntimeError("a bug of ours")
        return Response("hello")

    server = HttpServer("127.0.0.1:0", health, CollectorRegistry(), routes=[Route("/ui", page)])
    address = server.start()
    try:
        assert ask(address, "/ui").body == b"hello"
        assert ask(address, "/x").json["paths"] == ["/health", "/metrics", "/ui"]
        answer = ask(address, "/ui?broken=1")
        assert answer.status == 500
        assert b"a bug" not in answer.body
        assert ask(address, "/health").status == 200
    finally:
        assert server.stop()


# Where it listens.


def test_a_port_in_use_is_one_clear_refusal_with_the_way_out(site: Site) -> None:
    port = site.address.rpartition(":")[2]
    second = HttpServer(site.address, health, CollectorRegistry())
    with pytest.raises(AddressRefused, match=f"{port}: another process has the port.*give another port"):
        second.start()
    assert second.stop()
    assert ask(site.address, "/health").status == 200


def test_the_port_is_free_again_after_a_stop() -> None:
    first = HttpServer("127.0.0.1:0", health, CollectorRegistry())
    address = first.start()
    with connect(address) as kept:  # a connection from the old one does not hold the port
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")
        assert first.stop()
        second = HttpServer(address, health, CollectorRegistry())
        assert second.start() == address
        assert ask(address, "/health").status == 200
        assert second.stop()


@pytest.mark.parametrize(
    "address", ["", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "::1:80", "example.org:80"]
)
def test_an_address_of_another_form_is_refused_with_the_form(address: str) -> None:
    with pytest.raises(AddressRefused, match=r"such as 127\.0\.0\.1:9464"):
        HttpServer(address, health, CollectorRegistry()).start()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(AddressRefused, match="no such address"):
        HttpServer("192.0.2.1:0", health, CollectorRegistry()).start()


def test_localhost_is_the_loopback_address() -> None:
    server = HttpServer("localhost:0", health, CollectorRegistry())
    assert server.start().startswith("127.0.0.1:")
    assert server.stop()


# Bounds.


def test_stopping_is_repeatable_and_needs_no_start() -> None:
    server = HttpServer("127.0.0.1:0", health, CollectorRegistry())
    assert server.stop()
    server = HttpServer("127.0.0.1:0", health, CollectorRegistry())
    address = server.start()
    assert server.stop()
    assert server.stop()
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def test_slow_clients_do_not_hold_up_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    made = threading.Event()

    async def endless(request: Request) -> Response:
        async def lots() -> Any:
            made.set()
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)

        return StreamingResponse(lots())

    server = HttpServer("127.0.0.1:0", health, CollectorRegistry(), routes=[Route("/endless", endless)])
    address = server.start()
    silent, half, unread = connect(address), connect(address), connect(address)
    with silent, half, unread:
        half.sendall(b"GET /health HT")
        unread.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert made.wait(10)
        assert ask(address, "/health").status == 200  # and they hold up nobody else
        began_s = time.monotonic()
        assert server.stop()
        assert time.monotonic() - began_s < 4
    assert "Traceback" not in caplog.text


def test_connections_that_stand_still_are_cut_and_ones_that_work_are_not() -> None:
    server = HttpServer("127.0.0.1:0", health, CollectorRegistry(), patience_s=0.1)
    address = server.start()
    try:
        silent, half = connect(address), connect(address)
        with silent, half:
            half.sendall(b"GET /health HTTP/1.1\r\n")
            for still in (silent, half):
                assert _ended(still)
        assert ask(address, "/health").status == 200
    finally:
        assert server.stop()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_more_connections_than_allowed_are_refused_and_then_served_again(site: Site) -> None:
    held = [connect(site.address) for _ in range(CONNECTIONS_MAX)]
    try:
        until(lambda: ask(site.address, "/health").status == 503)
    finally:
        for connection in held:
            connection.close()
    until(lambda: ask(site.address, "/health").status == 200)


def test_a_connection_serves_many_requests_and_garbage_ends_only_its_own(site: Site) -> None:
    with connect(site.address) as garbage:
        garbage.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert garbage.recv(100).startswith(b"HTTP/1.1 400")
    host, _, port = site.address.rpartition(":")
    kept = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        for _ in range(50):
            kept.request("GET", "/metrics")
            assert len(kept.getresponse().read()) > 1000
    finally:
        kept.close()

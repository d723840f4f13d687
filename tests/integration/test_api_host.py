"""What runs and what is left on a host, asked for over a real NATS and by the command line: answers, order, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from actors.decisions.reclaim import LiveMachine
from actors.errors import DriverError
from actors.reclaiming import Leftover
from actors.sweep import Finding, Report, Stopped
from infra.api.client import ApiClient, ApiRefused
from infra.api.host_messages import StopRequest, SweepRequest
from infra.cli.main import main
from tests.conftest import NatsServer
from tests.integration.api_site import ApiSite

ORPHAN = LiveMachine(
    vm="a-1",
    scaler="vms",
    owner="alpha",
    status="orphaned",
    why="nobody knows it",
    place="/j/a-1",
    pid=7,
    age_s=45.4,
)
TRACKED = LiveMachine(vm="a-2", scaler="vms", owner="alpha", status="tracked", why="the log", place="/j/a-2")
DOUBTFUL = LiveMachine(
    vm="a-3", scaler="vms\x1b[31m", owner=None, status="unverified", why="no mark", place="/j/a-3"
)


class ScriptedCare:
    """A host with three machines, of which one may be stopped; remembers what it was asked."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.sweeps: list[bool] = []
        self.report = Report()
        self.error: Exception | None = None

    def live(self, timeout_s: float | None = None) -> tuple[LiveMachine, ...]:
        if self.error is not None:
            raise self.error
        return (ORPHAN, TRACKED, DOUBTFUL)

    def stop(self, vm: str, by: str, timeout_s: float | None = None) -> Stopped:
        self.stopped.append(vm)
        if self.error is not None:
            raise self.error
        outcome = {"a-1": "stopped", "a-2": "tracked", "a-3": "unverified"}.get(vm, "not-found")
        return Stopped(vm=vm, outcome=outcome, detail=f"by {by}")  # type: ignore[arg-type]

    def sweep(self, why: str, *, dry_run: bool = False, timeout_s: float | None = None) -> Report:
        self.sweeps.append(dry_run)
        return self.report


@pytest.fixture
def care() -> ScriptedCare:
    return ScriptedCare()


@pytest.fixture
def site(nats_server: NatsServer, care: ScriptedCare) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    site.care = care
    site.start_coordinator()
    with site.serving():
        yield site
    site.close()


@pytest.fixture
def client(site: ApiSite) -> ApiClient:
    return ApiClient(site.connection, site.cluster)


def command(site: ApiSite, *arguments: str) -> Result:
    creds = str(site.address.creds)
    options = ["--nats", site.address.url, "--nats-creds", creds, "--cluster", site.cluster]
    return CliRunner().invoke(main, [*options, *arguments])


def said(site: ApiSite, *arguments: str, expect: int = 0) -> Any:
    result = command(site, "--json", *arguments)
    assert result.exit_code == expect, result.output
    return json.loads(result.stdout)


def test_each_machine_named_is_stopped_once_in_order(client: ApiClient, care: ScriptedCare) -> None:
    answer = client.stop_machines("alpha", StopRequest(vms=("a-2", "a-1", "a-2", "x/../a-1"), by="me"))
    assert [(each.vm, each.outcome) for each in answer.results] == [
        ("a-2", "tracked"),
        ("a-1", "stopped"),
        ("x/../a-1", "not-found"),
    ]
    assert care.stopped == ["a-2", "a-1", "x/../a-1"]


def test_one_that_fails_keeps_nobody_from_the_others(client: ApiClient, care: ScriptedCare) -> None:
    care.error = DriverError("still-there", "it outlives SIGKILL", transient=True)
    answer = client.stop_machines("alpha", StopRequest(vms=("a-1", "a-2")))
    assert [(each.outcome, each.detail) for each in answer.results] == [("error", "it outlives SIGKILL")] * 2
    with pytest.raises(ApiRefused, match="it outlives SIGKILL") as refused:
        client.live_machines("alpha")
    assert refused.value.code == "host"


@pytest.mark.parametrize("vms", [(), tuple(f"a-{number}" for number in range(101))])
def test_none_and_more_than_a_hundred_are_refused(client: ApiClient, vms: tuple[str, ...]) -> None:
    with pytest.raises(ApiRefused, match="field vms"):
        client.stop_machines("alpha", StopRequest(vms=vms))


def test_a_sweep_says_what_it_did_about_each(site: ApiSite, client: ApiClient, care: ScriptedCare) -> None:
    what = Leftover(kind="tap", name="flt-0a000002", vm=None, owner="alpha", life="dead", evidence="seen")
    care.report = Report(
        findings=(Finding(leftover=what, outcome="reaped", why="leased to nobody"),), unlisted=("no netlink",)
    )
    answer = client.sweep("alpha", SweepRequest(dry_run=True))
    assert [(each.kind, each.name, each.outcome) for each in answer.findings] == [
        ("tap", "flt-0a000002", "reaped")
    ]
    assert (answer.unlisted, answer.host, care.sweeps) == (("no netlink",), "alpha-host", [True])
    body = said(site, "reap", expect=1)
    assert (body["counts"], body["total"], body["unlisted"]) == ({"tap": 1}, 1, ["no netlink"])
    care.report = Report(findings=care.report.findings)
    result = command(site, "reap")
    assert result.exit_code == 0
    assert "taken away: 1 tap" in result.stdout


def test_orphans_are_listed_without_those_that_somebody_accounts_for(site: ApiSite) -> None:
    assert [each["vm"] for each in said(site, "orphans")["machines"]] == ["a-1", "a-3"]
    assert [each["vm"] for each in said(site, "orphans", "--all")["machines"]] == ["a-1", "a-2", "a-3"]
    text = command(site, "orphans").stdout
    assert "45s" in text
    assert "\x1b[31m" not in text, "what a mark says is not to be trusted on a terminal"


def test_a_stop_applies_exactly_what_was_shown(site: ApiSite, care: ScriptedCare) -> None:
    assert said(site, "orphans", "--stop", "--dry-run")["would_stop"] == ["a-1"]
    assert care.stopped == []
    assert said(site, "orphans", "--stop", "--yes")["results"][0]["outcome"] == "stopped"
    assert care.stopped == ["a-1"]
    results = said(site, "orphans", "--stop", "--yes", "--vm", "a-3", "--vm", "a-2", expect=1)["results"]
    assert [(each["vm"], each["outcome"]) for each in results] == [("a-3", "unverified"), ("a-2", "tracked")]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("orphans", "--yes"), "go with --stop"),
        (("orphans", "--vm", "a-1"), "go with --stop"),
        (("orphans", "--dry-run"), "go with --stop"),
        (("orphans", "--timeout", "0.5"), "--timeout"),
        (("orphans", "--timeout", "241"), "--timeout"),
        (("orphans", "--stop"), "give --yes"),
        (("reap", "--force"), "go with --offline"),
        (("reap", "--offline"), "needs --config"),
    ],
)
def test_what_does_not_fit_together_is_a_usage_error(
    site: ApiSite, care: ScriptedCare, arguments: tuple[str, ...], why: str
) -> None:
    result = command(site, *arguments)
    assert result.exit_code == 2
    assert why in result.stderr
    assert care.stopped == []


def test_a_coordinator_without_a_host_says_so(nats_server: NatsServer) -> None:
    bare = ApiSite(nats_server)
    try:
        with bare.serving(), pytest.raises(ApiRefused, match="cannot reclaim") as refused:
            ApiClient(bare.connection, bare.cluster).live_machines("alpha")
        assert refused.value.code == "unsupported"
    finally:
        bare.close()

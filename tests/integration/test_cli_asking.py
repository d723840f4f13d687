"""The command line asks a coordinator: for agents, gates, explanations, log lines, and ends."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.commands import Answer, Demand, RemoveAgent, SetGate
from actors.errors import Refused
from infra.cli.exits import ExitCode
from tests.conftest import NatsServer
from tests.integration.api_site import BUSY, ApiSite, run_cli


@pytest.fixture
def fleet(nats_server: NatsServer) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    site.fill()
    yield site
    site.close()


def test_scaler_list_asks_the_coordinator_and_falls_back_to_the_log(fleet: ApiSite) -> None:
    with fleet.serving():
        (live,) = fleet.cli_json("scaler", "list")["scalers"]
    (logged,) = fleet.cli_json("scaler", "list")["scalers"]
    assert (live["live"], live["taken"], live["max_agents"]) == (True, 1, 3)
    assert (logged["live"], logged["taken"], logged["max_agents"]) == (False, 2, 3)
    assert logged["labels"] == [["linux", "small"]]
    assert "alpha does not answer" in fleet.cli("scaler", "list").stderr


def test_a_gate_is_set_by_the_coordinator_that_has_the_scaler(fleet: ApiSite) -> None:
    with fleet.serving():
        for verb, gate in (("pause", "paused"), ("drain", "draining"), ("resume", "open")):
            assert fleet.cli("scaler", verb, "small").exit_code == 0
            asked = fleet.door.asked[-1]
            assert isinstance(asked, SetGate)
            assert (asked.scaler, asked.gate) == ("small", gate)
            assert asked.by
        unknown = fleet.cli("scaler", "pause", "nosuch")
        assert unknown.exit_code == ExitCode.REFUSED
        assert "there are: small" in unknown.stderr
        elsewhere = fleet.cli("scaler", "pause", "small", "--coordinator", "beta")
        assert elsewhere.exit_code == ExitCode.REFUSED
        assert "alpha" in elsewhere.stderr


def test_match_explains_with_and_without_a_coordinator(fleet: ApiSite, tmp_path: Path) -> None:
    with fleet.serving():
        taken = fleet.cli("scaler", "match", "-l", "linux")
        refused = fleet.cli("scaler", "match", "-l", "linux,gpu")
    assert (taken.exit_code, refused.exit_code) == (0, ExitCode.FOUND)
    assert "it does not have [gpu]" in refused.stdout
    assert fleet.cli("scaler", "match", "-l", "linux").exit_code == ExitCode.UNREACHABLE
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "version: 1\nscalers:\n  - name: metal\n    backend: bare-metal\n    max_agents: 1\n"
        "    label_sets:\n      - {labels: [linux], binary_path: /bin/true}\n"
    )
    offline = run_cli("scaler", "match", "-l", "linux", "--config", str(file), "--json")
    assert offline.exit_code == 0, offline.output
    assert json.loads(offline.stdout)["explanations"][0]["scaler"] == "metal"


def test_rm_and_logs_go_to_the_coordinator_that_has_the_duty(fleet: ApiSite) -> None:
    fleet.door.lines = ("one\ttab", "\x1b[31mred\x1b[0m \x1b]0;title\x07end")
    with fleet.serving():
        assert fleet.cli("agent", "rm", BUSY, "--force").exit_code == 0
        asked = fleet.door.asked[-1]
        assert isinstance(asked, RemoveAgent)
        assert (asked.vm, asked.force) == (BUSY, True)
        shown = fleet.cli("agent", "logs", BUSY, "-n", "2")
        assert shown.stdout == "one     tab\nred \\u001b]0;title\\u0007end\n"
        assert fleet.cli_json("agent", "logs", BUSY)["lines"] == list(fleet.door.lines)
        fleet.door.error = Refused("busy", "agent a-busy runs a job: --force ends it all the same")
        busy = fleet.cli("agent", "rm", BUSY)
    assert busy.exit_code == ExitCode.REFUSED
    assert busy.stderr == "fleetlog: agent a-busy runs a job: --force ends it all the same\n"
    gone = fleet.cli("agent", "rm", BUSY)
    assert gone.exit_code == ExitCode.UNREACHABLE


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        (Answer(kind="spawning", vm="a-new", scaler="small"), 0, "a-new"),
        (Answer(kind="existing", vm="a-new", scaler="small"), 0, "existing"),
        (
            Answer(kind="at-capacity", cap="global-agents", message="5 of 5"),
            1,
            "at-capacity (global-agents): 5 of 5",
        ),
        (Answer(kind="no-backend", message="there are: small [linux]"), 1, "there are: small [linux]"),
        (Answer(kind="refused", message="scaler small is paused"), 1, "is paused"),
        (Answer(kind="skipped", message="backs off", retry_after_s=61), 1, "ask again in 1m1s"),
    ],
)
def test_demand_says_what_became_of_it(fleet: ApiSite, answer: Answer, code: int, told: str) -> None:
    fleet.door.answers = (answer,)
    with fleet.serving():
        result = fleet.cli(
            "demand", "--labels", "Linux, small", "--cpus", "2", "--memory", "1.5g", "--run", "r"
        )
        assert fleet.cli_json("demand", "-l", "x", code=code)["answers"][0]["kind"] == answer.kind
    assert result.exit_code == code
    assert told in result.stdout
    asked = fleet.door.asked[0]
    assert isinstance(asked, Demand)
    assert (asked.labels, asked.run, asked.limits.memory_bytes) == (("Linux", "small"), "r", 3 << 29)


def spawned_by(site: ApiSite, *vms: str, then: Callable[[], None]) -> Callable[[Demand], tuple[Answer, ...]]:
    """Answer a demand with these machines, whose lives go on as `then` has it once the answer is out."""

    def answer(_demand: Demand) -> tuple[Answer, ...]:
        for vm in vms:
            site.request(vm)
        threading.Timer(0.05, then).start()
        return tuple(Answer(kind="spawning", vm=vm, scaler="small") for vm in vms)

    return answer


def test_demand_waits_until_every_agent_registered(fleet: ApiSite) -> None:
    def then() -> None:
        fleet.register("a-one")
        fleet.register("a-two")

    fleet.door.on_demand = spawned_by(fleet, "a-one", "a-two", then=then)
    with fleet.serving():
        body = fleet.cli_json("demand", "-l", "linux", "-n", "2", "--wait", "--timeout", "20s")
    assert {fate["vm"]: fate["outcome"] for fate in body["waited"]} == {
        "a-one": "registered",
        "a-two": "registered",
    }


def test_demand_that_waits_exits_1_when_one_failed_and_says_why(fleet: ApiSite) -> None:
    def then() -> None:
        fleet.register("a-one")
        fleet.fail("a-two", "no kernel")

    fleet.door.on_demand = spawned_by(fleet, "a-one", "a-two", then=then)
    with fleet.serving():
        result = fleet.cli("demand", "-l", "linux", "-n", "2", "--wait", "--timeout", "20s")
    assert result.exit_code == ExitCode.FOUND
    assert re.search(r"a-two failed after [0-9.]+s: launch-failed; no kernel", result.stderr)


def test_demand_for_a_job_that_has_its_agent_already_does_not_wait_for_ever(fleet: ApiSite) -> None:
    fleet.door.answers = (Answer(kind="existing", vm=BUSY, scaler="small"),)
    with fleet.serving():
        body = fleet.cli_json("demand", "-l", "linux", "--job", "build-1", "--wait", "--timeout", "20s")
    assert body["waited"][0]["outcome"] == "registered"


def test_demand_that_waited_long_enough_exits_5(fleet: ApiSite) -> None:
    fleet.door.answers = (Answer(kind="spawning", vm="a-slow", scaler="small"),)
    with fleet.serving():
        result = fleet.cli("demand", "-l", "linux", "--wait", "--timeout", "1s")
    assert result.exit_code == ExitCode.TIMEOUT
    assert "a-slow" in result.stderr


def test_demand_without_a_coordinator_exits_4(fleet: ApiSite) -> None:
    result = fleet.cli("demand", "-l", "linux")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "fleetlog up" in result.stderr

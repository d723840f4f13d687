"""The command line against a real NATS with a real log, a scripted coordinator, and a real PostgreSQL."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from actors.commands import Answer, Demand, RemoveAgent, SetGate
from actors.errors import Refused
from infra.api.messages import HostDifference
from infra.cli.exits import ExitCode
from infra.embedded.data_directory import DataDirectory
from infra.journal.jetstream import call
from infra.journal.wire import Wire
from tests.conftest import NatsServer
from tests.integration.api_site import ApiSite, run_cli

BUSY, DEAD, OVER = "a-busy", "a-dead", "a-over"


@pytest.fixture
def site(nats_server: NatsServer) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    yield site
    site.close()


@pytest.fixture
def fleet(site: ApiSite) -> ApiSite:
    """One agent registered, one failed, one reaped; 18 facts."""
    site.start_coordinator()
    site.request(BUSY, job="build-1")
    site.register(BUSY)
    site.request(DEAD, job="two")
    site.fail(DEAD, "no \x1b[2J/dev/kvm")
    site.request(OVER)
    site.register(OVER)
    site.reap(OVER)
    return site


def test_agent_list_shows_the_living_newest_first_and_all_of_them_when_asked(fleet: ApiSite) -> None:
    living = fleet.cli_json("agent", "list")
    assert [row["id"] for row in living["agents"]] == [DEAD, BUSY]
    assert living["source"] == {
        "kind": "log",
        "sequence": 18,
        "behind": 0,
        "saved_at": None,
        "why": living["source"]["why"],
    }
    everything = fleet.cli_json("agent", "list", "--all")
    assert {row["id"]: row["phase"] for row in everything["agents"]} == {
        BUSY: "registered",
        DEAD: "failed",
        OVER: "reaped",
    }
    assert everything["agents"][0]["labels"] == ["linux", "small"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--phase", "registered"], [BUSY]),
        (["--phase", "reaped"], [OVER]),
        (["--job", "two"], [DEAD]),
        (["--scaler", "other"], []),
        (["--coordinator", "alpha", "--limit", "1"], [DEAD]),
        (["--since", "1m"], []),
        (["--since", "2h"], [DEAD, BUSY]),
    ],
)
def test_agent_list_chooses(fleet: ApiSite, options: list[str], found: list[str]) -> None:
    assert [row["id"] for row in fleet.cli_json("agent", "list", *options)["agents"]] == found


def test_agent_list_for_people_says_where_it_comes_from_beside_the_table(fleet: ApiSite) -> None:
    result = fleet.cli("agent", "list")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["AGENT", "PHASE", "SCALER", "AGE", "JOB", "REASON"]
    assert "from the log, up to sequence 18" in result.stderr
    assert fleet.cli("agent", "list", "--scaler", "other").stdout == "no agents\n"


def test_describe_tells_the_whole_life_with_causes_and_nothing_that_moves_a_cursor(fleet: ApiSite) -> None:
    result = fleet.cli("agent", "describe", DEAD)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    for told in (
        "failed",
        "alpha-host",
        "launch-failed: no \\u001b[2J/dev/kvm",
        "demand:a-dead",
        "/run/a-dead",
    ):
        assert told in result.stdout
    body = fleet.cli_json("agent", "describe", BUSY)
    assert body["agent"]["handle"]["data"] == {"pid": 77}
    assert [fact["tag"] for fact in body["timeline"]] == [
        "vm.requested",
        "vm.spawn_started",
        "vm.spawned",
        "vm.registered",
    ]
    assert body["timeline"][0]["cause"] == "demand:a-busy"


def test_an_unknown_agent_is_refused_with_the_way_to_find_one(fleet: ApiSite) -> None:
    for args in (["describe"], ["events"], ["logs"], ["rm"]):
        result = fleet.cli("agent", *args, "a-nobody")
        assert result.exit_code == ExitCode.REFUSED
        assert "agent list --all" in result.stderr


def test_another_cluster_on_the_same_nats_has_no_log_and_gets_none(fleet: ApiSite) -> None:
    result = run_cli(
        "--cluster",
        "nobodys",
        "--nats",
        fleet.server.url,
        "--creds",
        str(fleet.server.creds_path),
        "agent",
        "list",
    )
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "--cluster" in result.stderr
    with Wire(fleet.address, name="test") as wire:
        names = call(wire, "STREAM.NAMES", None, 5)["streams"]
    assert "FLEETLOG_NOBODYS" not in names


def test_credentials_that_are_refused_are_told_apart_from_no_server(fleet: ApiSite) -> None:
    result = run_cli("--cluster", fleet.cluster, "--nats", fleet.server.url, "agent", "list", "--json")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert json.loads(result.stdout)["error"]["code"] == "nats-refused"


def test_the_data_directory_leads_to_the_running_coordinator(fleet: ApiSite, tmp_path: Path) -> None:
    with DataDirectory(tmp_path / "data") as directory:
        directory.publish_runtime(
            coordinator="alpha", nats_url=fleet.server.url, nats_creds=fleet.server.operator_creds_path
        )
        result = run_cli(
            "--data-dir", str(tmp_path / "data"), "--cluster", fleet.cluster, "--json", "agent", "list"
        )
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["agents"]) == 2


def test_replay_shows_the_fleet_as_it_was(fleet: ApiSite) -> None:
    def phases(*args: str) -> dict[str, str]:
        return {row["id"]: row["phase"] for row in fleet.cli_json("replay", *args)["agents"]}

    assert phases("--at", "0") == {}
    assert phases("--at", "4") == {BUSY: "requested"}
    assert phases("--at", "7") == {BUSY: "registered"}
    assert phases("--at", "16") == {BUSY: "registered", DEAD: "failed", OVER: "registered"}
    assert phases("--at", "18") == {BUSY: "registered", DEAD: "failed"}
    assert phases("--at", "18", "--all")[OVER] == "reaped"
    assert phases("--at", "2d") == {}
    assert fleet.cli_json("replay", "--at", "7")["source"]["behind"] == 11


def test_replay_into_the_future_is_refused(fleet: ApiSite) -> None:
    for when in ("19", "2999-01-01"):
        result = fleet.cli("replay", "--at", when)
        assert result.exit_code == ExitCode.USAGE
        assert "ends at sequence 18" in result.stderr


def sequences(text: str) -> list[int]:
    return [json.loads(line)["sequence"] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], list(range(1, 19))),
        (["--last", "2"], [17, 18]),
        (["--last", "0"], []),
        (["--since", "16"], [16, 17, 18]),
        (["--since", "99"], []),
        (["--since", "3", "--until", "5"], [3, 4, 5]),
        (["--since", "5", "--until", "3"], []),
        (["--agent", DEAD], [9, 10, 11]),
        (["--agent", DEAD, "--last", "1"], [11]),
        (["--agent", DEAD, "--since", "10"], [10, 11]),
        (["--scaler", "small", "--until", "5"], [3, 4, 5]),
        (["--scaler", "small", "--since", "17"], [17, 18]),
        (["--scaler", "other"], []),
        (["--until", "1d"], []),
    ],
)
def test_events_are_chosen_by_agent_scaler_and_place(
    fleet: ApiSite, options: list[str], found: list[int]
) -> None:
    result = fleet.cli("events", "--json", *options)
    assert result.exit_code == 0, result.output
    assert sequences(result.stdout) == found


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


def command(site: ApiSite, *args: str) -> list[str]:
    options = [
        "--cluster",
        site.cluster,
        "--nats",
        site.server.url,
        "--creds",
        str(site.server.operator_creds_path),
    ]
    return [sys.executable, "-m", "infra.cli.main", *options, *args]


def test_events_are_followed_live_until_ctrl_c_which_exits_130(fleet: ApiSite) -> None:
    with subprocess.Popen(
        command(fleet, "events", "--follow", "--scaler", "small", "--last", "1", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert json.loads(process.stdout.readline())["sequence"] == 18
            fleet.request("a-other", scaler="other")
            fleet.request("a-live")
            fleet.register("a-live")
            seen = [json.loads(process.stdout.readline()) for _ in range(5)]
            assert [fact["tag"] for fact in seen] == [
                "backend.slot_taken",
                "vm.requested",
                "vm.spawn_started",
                "vm.spawned",
                "vm.registered",
            ]
            assert {fact["sequence"] for fact in seen}.isdisjoint({19, 20})
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == ExitCode.INTERRUPTED
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_reader_that_has_had_enough_is_no_error(fleet: ApiSite) -> None:
    for number in range(40):
        fleet.request(f"a-{number:04}")
    with subprocess.Popen(
        command(fleet, "events", "--since", "0", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        process.wait(20)
        assert process.stderr.read() == b""


def test_log_show_and_resize(fleet: ApiSite) -> None:
    assert fleet.cli_json("log", "show")["facts"] == 18
    assert fleet.cli_json("log", "resize", "32m")["limit_bytes"] == 32 << 20
    result = fleet.cli("log", "resize", "1k")
    assert result.exit_code == ExitCode.FOUND
    assert "nothing is dropped" in result.stderr
    assert fleet.cli_json("log", "show")["limit_bytes"] == 32 << 20


def test_log_archive_writes_closed_lives_and_refuses_to_replace(fleet: ApiSite, tmp_path: Path) -> None:
    file = tmp_path / "lives.gz"
    done = fleet.cli_json("log", "archive", str(file))
    assert (done["lives"], done["facts"]) == (1, 6)
    again = fleet.cli("log", "archive", str(file))
    assert again.exit_code == ExitCode.FOUND
    assert "choose another name" in again.stderr
    assert run_cli("log", "archive", "--verify", str(file)).exit_code == 0
    file.write_bytes(file.read_bytes()[:-20])
    assert run_cli("log", "archive", "--verify", str(file)).exit_code == ExitCode.FOUND
    nowhere = fleet.cli("log", "archive", str(tmp_path / "none" / "x.gz"))
    assert nowhere.exit_code == ExitCode.USAGE


def test_rebuild_then_list_from_the_tables_and_verify_finds_a_changed_row(
    fleet: ApiSite, postgres_dsn: str
) -> None:
    tables = ("--postgres", postgres_dsn)
    assert "--yes" in fleet.cli(*tables, "rebuild").stderr
    views = fleet.cli_json(*tables, "rebuild", "--yes")["views"]
    assert {view["view"]: view["sequence"] for view in views} == {"fleet": 18, "timeline": 18}
    listed = fleet.cli_json(*tables, "agent", "list")
    assert (listed["source"]["kind"], listed["source"]["behind"]) == ("tables", 0)
    assert listed["agents"] == fleet.cli_json("--source", "log", "agent", "list")["agents"]
    from_tables = fleet.cli_json(*tables, "--source", "tables", "agent", "describe", BUSY)
    assert from_tables == fleet.cli_json("agent", "describe", BUSY)
    assert fleet.cli(*tables, "verify", "--no-hosts").exit_code == 0
    schema = f"fleetlog_{fleet.cluster.replace('-', '_')}"
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"update {schema}.agents set phase = 'spawned' where id = '{BUSY}'")  # noqa: S608
    found = fleet.cli_json(*tables, "verify", "--no-hosts", code=1)
    assert [(each["kind"], each["key"]) for each in found["differences"]] == [("different-row", BUSY)]
    fleet.request("a-later")
    assert fleet.cli_json(*tables, "agent", "list")["source"]["behind"] == 2


def test_tables_that_do_not_answer_are_no_reason_not_to_list(fleet: ApiSite) -> None:
    dead = ("--postgres", "postgresql://nobody@127.0.0.1:9/none?connect_timeout=1")
    listed = fleet.cli_json(*dead, "agent", "list")
    assert listed["source"]["kind"] == "log"
    assert "127.0.0.1:9" in listed["source"]["why"]
    insisted = fleet.cli(*dead, "--source", "tables", "agent", "list")
    assert insisted.exit_code == ExitCode.UNREACHABLE


def test_verify_asks_the_hosts_and_says_which_it_could_not(fleet: ApiSite) -> None:
    silent = fleet.cli_json("verify", code=1)
    assert silent["hosts"][0]["asked"] is False
    with fleet.serving():
        assert fleet.cli_json("verify")["same"] is True
        fleet.differences = (
            HostDifference(kind="leftover", where="bare-metal", key="cgroup x", detail="of a-over"),
        )
        found = fleet.cli("verify")
    assert found.exit_code == ExitCode.FOUND
    assert "cgroup x" in found.stdout


def statuses(body: dict[str, object]) -> dict[str, str]:
    checks = body["checks"]
    assert isinstance(checks, list)
    return {check["name"]: check["status"] for check in checks}


def test_doctor_of_a_healthy_cluster_passes(fleet: ApiSite, postgres_dsn: str) -> None:
    fleet.cli_json("--postgres", postgres_dsn, "rebuild", "--yes")
    with fleet.serving():
        body = fleet.cli_json("--postgres", postgres_dsn, "doctor")
    found = statuses(body)
    for name in (
        "nats",
        "log settings",
        "log integrity",
        "log room",
        "clock",
        "coordinator alpha",
        "durability",
    ):
        assert found[name] == "pass", body
    assert found["table fleet"] == found["postgres"] == "pass"


def test_doctor_names_a_coordinator_that_died_and_exits_1(fleet: ApiSite) -> None:
    body = fleet.cli_json("doctor", code=1)
    assert statuses(body)["coordinator alpha"] == "fail"
    result = fleet.cli("doctor")
    assert "coordinator alpha: start it again" in result.stdout


def test_doctor_finds_foreign_settings_of_the_stream(fleet: ApiSite) -> None:
    with Wire(fleet.address, name="test") as wire:
        name = f"FLEETLOG_{fleet.cluster.upper().replace('-', '_')}"
        config = call(wire, f"STREAM.INFO.{name}", None, 5)["config"]
        call(wire, f"STREAM.UPDATE.{name}", config | {"discard": "old"}, 5)
    body = fleet.cli_json("doctor", code=1)
    assert statuses(body)["log settings"] == "fail"
    assert fleet.cli("agent", "list").exit_code == ExitCode.FOUND


def test_doctor_says_so_when_nothing_answers(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run_cli(
        "--nats", "nats://127.0.0.1:9", "--postgres", "postgresql://x@127.0.0.1:9/x", "doctor", "--json"
    )
    assert result.exit_code == ExitCode.FOUND
    found = statuses(json.loads(result.stdout))
    assert (found["nats"], found["postgres"]) == ("fail", "fail")
    assert time.monotonic() - began < 30


def test_doctor_looks_for_the_programs_of_a_fleet_file(fleet: ApiSite, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "version: 1\nscalers:\n  - name: metal\n    backend: bare-metal\n    max_agents: 1\n    label_sets:\n"
        "      - {labels: [a], binary_path: /bin/true}\n      - {labels: [b], binary_path: /nonexistent/agent}\n"
    )
    with fleet.serving():
        body = fleet.cli_json("doctor", "--config", str(file), code=1)
    found = statuses(body)
    assert found["program of metal[0]"] == "pass"
    assert found["program of metal[1]"] == "fail"

"""The command line reads a real log: lists, lives, replays, facts by place and live."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.cli.exits import ExitCode
from infra.embedded.data_directory import DataDirectory
from infra.journal.jetstream import call
from infra.journal.wire import Wire
from tests.conftest import NatsServer
from tests.integration.api_site import BUSY, DEAD, OVER, ApiSite, run_cli


@pytest.fixture
def fleet(nats_server: NatsServer) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    site.fill()
    yield site
    site.close()


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

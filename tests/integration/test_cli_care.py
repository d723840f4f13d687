"""The command line looks after log, tables and hosts: resize, archive, rebuild, verify, doctor."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from infra.api.messages import HostDifference
from infra.cli.exits import ExitCode
from infra.journal.jetstream import call
from infra.journal.wire import Wire
from tests.conftest import NatsServer
from tests.integration.api_site import BUSY, ApiSite, run_cli


@pytest.fixture
def fleet(nats_server: NatsServer) -> Iterator[ApiSite]:
    site = ApiSite(nats_server)
    site.fill()
    yield site
    site.close()


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

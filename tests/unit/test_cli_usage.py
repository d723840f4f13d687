"""The command line as it is typed: what is refused before anything is touched, and with which words and exit codes."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from infra.cli.command import MainGroup
from infra.cli.exits import ExitCode
from infra.cli.main import COMMANDS, main
from infra.cli.session import default_data_directory
from infra.config.load import load


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(main, args)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_json(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    command = main.get_command(click.Context(main), name)
    leaves = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        assert leaf is not None
        if (name, leaf.name) != ("config", "schema"):  # is JSON always
            assert any("--json" in parameter.opts for parameter in leaf.params), f"{name} {leaf.name}"
        assert leaf.help or leaf.short_help


def test_the_help_documents_every_exit_code() -> None:
    text = run("--help").output
    for code in ExitCode:
        assert f"\n    {code.value:<3}  " in text


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["nosuch"], "there are: up, demo, demand"),
        (["agent", "nosuch"], "there are: list, describe"),
        (["--cluster", "Prod", "agent", "list"], "lowercase letters"),
        (["--cluster", "a.b", "agent", "list"], "lowercase letters"),
        (["--nats-creds", "/nonexistent", "agent", "list"], "does not exist"),
        (["--tls-key", __file__, "agent", "list"], "--tls-cert"),
        (["--nats", "http://host", "agent", "list"], "nats://host:port"),
        (["--nats", "nats://host:99999999", "agent", "list"], "nats://host:port"),
        (["--source", "psychic", "agent", "list"], "'auto', 'log', 'tables'"),
        (["demand"], "--labels"),
        (["demand", "-l", "two words"], "without spaces"),
        (["demand", "-l", "linux,,small"], "without spaces"),
        (["demand", "-l", ",".join(f"l{n}" for n in range(65))], "at most 64"),
        (["demand", "-l", "x", "--count", "0"], "1<=x<=100"),
        (["demand", "-l", "x", "--count", "101"], "1<=x<=100"),
        (["demand", "-l", "x", "--count", "2", "--job", "j"], "a job gets one agent"),
        (["demand", "-l", "x", "--memory", "1"], "such as 512m"),
        (["demand", "-l", "x", "--memory", "4Gi"], "such as 512m"),
        (["demand", "-l", "x", "--timeout", "soon"], "30s, 10m or 1h30m"),
        (["agent", "describe"], "AGENT"),
        (["agent", "describe", "No Such"], "lowercase letters"),
        (["agent", "describe", "../../etc/passwd"], "lowercase letters"),
        (["agent", "rm"], "AGENT"),
        (["agent", "logs", "a-1", "-n", "0"], "1<=x<=10000"),
        (["agent", "list", "--phase", "happy"], "registered"),
        (["agent", "list", "--since", "5"], "2h or 2026"),
        (["events", "--since", "yesterday"], "10m, 2h or 1h30m"),
        (["events", "--follow", "--until", "1h"], "give one of them"),
        (["events", "--agent", "a-1", "--scaler", "s"], "give one of them"),
        (["replay"], "--at"),
        (["replay", "--at", "then"], "10m, 2h or 1h30m"),
        (["scaler", "pause", "UPPER"], "lowercase letters"),
        (["verify", "--no-hosts", "--no-tables"], "nothing to compare"),
        (["log", "resize", "huge"], "such as 512m"),
        (["rebuild", "--view", "nosuch"], "fleet"),
    ],
)
def test_bad_usage_exits_2_and_names_what_would_do(args: list[str], told: str) -> None:
    result = run(*args)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert told in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    as_json = run(*args, "--json")
    assert as_json.exit_code == ExitCode.USAGE
    assert told in " ".join(json.loads(as_json.stdout)["error"]["message"].split())


@pytest.mark.parametrize("args", [["agent", "list"], ["events"], ["demand", "-l", "x"], ["log", "show"]])
def test_without_a_coordinator_the_way_out_is_named_and_the_exit_code_is_4(
    args: list[str], tmp_path: Path
) -> None:
    result = run("--data-dir", str(tmp_path / "none"), *args)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "fleetlog up" in result.stderr
    assert "--nats" in result.stderr
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_a_nats_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    result = run("--nats", "nats://127.0.0.1:9", "agent", "list", "--json")
    assert result.exit_code == ExitCode.UNREACHABLE
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "log-unavailable"
    assert "127.0.0.1:9" in error["message"]


def test_a_password_in_the_url_is_never_shown() -> None:
    for url in ("nats://ann:hunter2@127.0.0.1:9", "nats://ann:hunter2@127.0.0.1:9/path"):
        result = run("--nats", url, "agent", "list")
        assert "hunter2" not in result.output


def test_options_come_from_the_environment(tmp_path: Path) -> None:
    result = run("agent", "list", env={"FLEETLOG_DATA_DIR": str(tmp_path / "from-env"), "FLEETLOG_JSON": "1"})
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "from-env" in json.loads(result.stdout)["error"]["message"]


def test_a_stale_runtime_file_is_no_coordinator(tmp_path: Path) -> None:
    stale = {"coordinator": "a", "pid": 1, "start_ticks": 1, "nats_url": "nats://127.0.0.1:9"}
    (tmp_path / "runtime.json").write_text(json.dumps(stale))
    result = run("--data-dir", str(tmp_path), "agent", "list")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "no coordinator runs" in result.stderr


def test_a_broken_runtime_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runtime.json").write_text("{")
    result = run("--data-dir", str(tmp_path), "agent", "list")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "runtime.json" in result.stderr


def test_the_data_directory_of_a_user_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_data_directory() == tmp_path / ".local/state/fleetlog"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_data_directory() == tmp_path / "state/fleetlog"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_data_directory() == tmp_path / ".local/state/fleetlog"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_data_directory() == Path("/var/lib/fleetlog")


@click.command(name="trouble")
@click.argument("what")
def trouble(what: str) -> None:
    """Fail in some way."""
    errors: dict[str, BaseException] = {
        "interrupt": KeyboardInterrupt(),
        "pipe": BrokenPipeError(),
        "bug": ZeroDivisionError("hidden"),
        "timeout": TimeoutError("too slow"),
    }
    raise errors[what]


def failing() -> MainGroup:
    group = MainGroup(name="fleetlog")
    group.add_command(trouble)
    return group


def test_ctrl_c_exits_130_without_a_trace() -> None:
    result = CliRunner().invoke(failing(), ["trouble", "interrupt"])
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "Traceback" not in result.output


def test_a_bug_shows_its_trace_and_is_called_one() -> None:
    result = CliRunner().invoke(failing(), ["trouble", "bug"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "bug in fleetlog" in result.stderr


def test_a_timeout_exits_5() -> None:
    result = CliRunner().invoke(failing(), ["trouble", "timeout"])
    assert result.exit_code == ExitCode.TIMEOUT
    assert result.stderr == "fleetlog: too slow\n"


def test_config_validate_names_every_problem_and_exits_1(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("version: 1\nglobal_max_agents: 0\nscalers:\n  - {name: BAD, backend: nosuch}\n")
    result = run("config", "validate", str(fleet))
    assert result.exit_code == ExitCode.FOUND
    assert "global_max_agents" in result.stdout
    assert "scalers[0]" in result.stdout
    body = run("config", "validate", str(fleet), "--json")
    assert body.exit_code == ExitCode.FOUND
    assert json.loads(body.stdout)["valid"] is False


def test_config_validate_of_a_good_file_says_its_digest(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("version: 1\nscalers: []\n")
    result = run("config", "validate", str(fleet), "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert body["valid"] is True
    assert len(body["digest"]) == 64


def test_the_api_command_needs_no_server_and_names_the_clusters_subjects() -> None:
    result = run("--cluster", "prod", "api")
    assert result.exit_code == 0
    assert "fleetlog.prod.api.demand" in result.stdout
    body = json.loads(run("--cluster", "prod", "api", "--json").stdout)
    assert body["verbs"]["demand"]["subject_of_any"] == "fleetlog.prod.api.demand"


def test_what_people_are_shown_of_a_scaler_has_its_label_sets(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "version: 1\nscalers:\n  - name: metal\n    backend: bare-metal\n    max_agents: 1\n"
        "    label_sets:\n      - {labels: [small, linux], binary_path: /bin/true}\n"
    )
    assert load(fleet).scaler("metal").rules("alpha").label_sets == (("linux", "small"),)

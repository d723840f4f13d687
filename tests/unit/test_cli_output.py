"""Tables on terminals and in pipes, and the one line every kind of trouble becomes."""

import io
import json
import re

import pytest
from rich.console import Console

from actors.errors import Conflict, LogFull, LogUnavailable, Refused, RowsRefused, RowsUnavailable
from infra.api.client import ApiRefused, NoCoordinator
from infra.cli.exits import CliError, ExitCode
from infra.cli.failures import expected
from infra.cli.out import Column, Output, print_error
from infra.journal.address import ConnectionRefusedByServer
from projections.vm import BrokenLog

COLUMNS = [Column(title="AGENT", whole=True), Column(title="AGE", right=True), Column(title="DETAIL")]
ROWS = [("a-0123456789abcdefghjkmnpqrs", "5s", "word " * 40), ("a-2", "12m3s", "[bold]not markup[/]")]


def on_terminal(width: int = 80) -> tuple[Output, io.StringIO]:
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, width=width, highlight=False, markup=False, emoji=False
    )
    return Output(as_json=False, console=console), written


def test_a_table_fits_80_columns_and_never_breaks_what_is_copied() -> None:
    out, written = on_terminal()
    out.table(COLUMNS, ROWS)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("a-0123456789abcdefghjkmnpqrs" in line for line in lines)


def test_in_a_pipe_a_row_is_one_line_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)
    assert lines[1].count("word") == 40
    assert lines[2].split("  ")[-1] == "[bold]not markup[/]"
    assert lines[0].index("AGE  ") + 3 == lines[1].index("5s") + 2  # right-aligned


def test_an_escape_sequence_in_a_cell_arrives_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    row = ("a", "1s", "x\x1b[2Jy\u202ez\nw")
    Output(as_json=False).table(COLUMNS, [row])
    out, written = on_terminal()
    out.table(COLUMNS, [row])
    for text in (capsys.readouterr().out, written.getvalue()):
        assert "\x1b[2J" not in text
        assert "\u202e" not in text


def test_json_is_ascii_so_that_a_terminal_can_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).document({"line": "\x1b[2J\x9b\u202eé"})
    text = capsys.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text) == {"line": "\x1b[2J\x9b\u202eé"}


def test_notes_are_beside_the_result_and_silent_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).note("by the way")
    Output(as_json=True).note("by the way")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "by the way\n")


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ApiRefused("busy", "x"), ExitCode.REFUSED, "busy"),
        (ApiRefused("timeout", "x"), ExitCode.TIMEOUT, "timeout"),
        (ApiRefused("log-unavailable", "x"), ExitCode.UNREACHABLE, "log-unavailable"),
        (Refused("at-capacity", "x"), ExitCode.REFUSED, "at-capacity"),
        (Conflict("x"), ExitCode.REFUSED, "conflict"),
        (LogFull("x"), ExitCode.REFUSED, "log-full"),
        (NoCoordinator("x"), ExitCode.UNREACHABLE, "no-coordinator"),
        (LogUnavailable("x"), ExitCode.UNREACHABLE, "log-unavailable"),
        (ConnectionRefusedByServer("x"), ExitCode.UNREACHABLE, "nats-refused"),
        (RowsUnavailable("x"), ExitCode.UNREACHABLE, "tables-unavailable"),
        (RowsRefused("x"), ExitCode.UNREACHABLE, "tables-refused"),
        (BrokenLog("x"), ExitCode.FOUND, "broken-log"),
        (TimeoutError("x"), ExitCode.TIMEOUT, "timeout"),
        (CliError(ExitCode.USAGE, "usage", "x"), ExitCode.USAGE, "usage"),
    ],
)
def test_every_expected_trouble_has_its_exit_code(error: Exception, code: ExitCode, kind: str) -> None:
    known = expected(error)
    assert known is not None
    assert (known.exit_code, known.kind) == (code, kind)


def test_what_nobody_expected_is_a_bug() -> None:
    assert expected(ZeroDivisionError("x")) is None


def test_an_error_is_a_sentence_on_stderr_or_an_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("busy", "a \x1b[31mred\x1b[0m reason", as_json=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "fleetlog: a \\u001b[31mred\\u001b[0m reason\n"
    print_error("busy", "why", as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": {"code": "busy", "message": "why"}}
    assert captured.err == ""

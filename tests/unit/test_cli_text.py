"""How the command line reads times and sizes, and shows ages and other people's text."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from infra.cli.text import When, age, moment, parse_length, parse_when, safe, safe_line, size

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "0s"),
        (0, "0s"),
        (45.9, "45s"),
        (59.999, "59s"),
        (60, "1m0s"),
        (723, "12m3s"),
        (3599, "59m59s"),
        (3600, "1h0m"),
        (3720, "1h2m"),
        (86_399, "23h59m"),
        (86_400, "1d0h"),
        (273_600, "3d4h"),
        (400 * 86_400, "400d0h"),
    ],
)
def test_ages_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("0", When(sequence=0)),
        ("1042", When(sequence=1042)),
        ("10m", When(time=NOW - timedelta(minutes=10))),
        ("2h", When(time=NOW - timedelta(hours=2))),
        ("1h30m", When(time=NOW - timedelta(hours=1, minutes=30))),
        ("3d4h", When(time=NOW - timedelta(days=3, hours=4))),
        (" 45s ", When(time=NOW - timedelta(seconds=45))),
        ("2026-02-28", When(time=datetime(2026, 2, 28, tzinfo=UTC))),
        ("2026-02-28T14:30", When(time=datetime(2026, 2, 28, 14, 30, tzinfo=UTC))),
        ("2026-02-28T14:30:00Z", When(time=datetime(2026, 2, 28, 14, 30, tzinfo=UTC))),
        ("2026-02-28 14:30:00.250+02:00", When(time=datetime(2026, 2, 28, 12, 30, 0, 250_000, tzinfo=UTC))),
    ],
)
def test_a_time_is_a_sequence_an_age_or_iso_8601(text: str, meant: When) -> None:
    assert parse_when(text, NOW) == meant


@pytest.mark.parametrize(
    "text",
    ["", " ", "yesterday", "-5m", "10x", "m10", "1h2h", "2026-13-01", "12:30", "1e9", "٣", "1" * 16, "1d1d"],
)
def test_what_is_no_time_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="10m, 2h or 1h30m"):
        parse_when(text, NOW)


def test_an_age_before_all_time_is_refused_and_not_an_accident() -> None:
    with pytest.raises(ValueError, match="before all time"):
        parse_when("999999d", NOW)


def test_a_length_is_seconds_and_anything_else_is_refused() -> None:
    assert parse_length("1h30m5s") == 5405
    for text in ("", "10", "abc", "-1s", "1.5h"):
        with pytest.raises(ValueError, match="30s, 10m or 1h30m"):
            parse_length(text)


def test_times_are_shown_in_utc_whatever_their_zone() -> None:
    at = datetime(2026, 3, 1, 14, 0, 0, 5999, tzinfo=timezone(timedelta(hours=2)))
    assert moment(at) == "2026-03-01 12:00:00.005Z"
    assert moment(None) == "-"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_are_powers_of_1024(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J", "\x1b]0;title\x07", "\r", "\n", "\x9b31m", "\u202e", "\u200b", "\x7f", "\x00"]
)
def test_nothing_an_agent_says_can_move_a_cursor_or_hide_itself(hostile: str) -> None:
    for shown in (safe(f"a{hostile}b"), safe_line(f"a{hostile}b")):
        assert hostile not in shown
        assert shown.isprintable()
        assert shown.startswith("a")
        assert shown.endswith("b")


def test_a_log_line_loses_its_colours_and_keeps_its_words() -> None:
    assert safe_line("\x1b[1;32mok\x1b[0m\tdone ✓\r\n") == "ok      done ✓"

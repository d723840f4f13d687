"""How times, ages, sizes and other people's text are read and shown."""

import re
from datetime import UTC, datetime, timedelta

import msgspec

from infra.config.problems import printable

_AGO = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?")
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE_DIGITS_MAX = 15
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400

WHEN_FORM = (
    "10m, 2h or 1h30m (ago), a time such as 2026-01-31T14:00:00Z (without a zone: UTC), "
    "or a sequence number such as 1042"
)


class When(msgspec.Struct, frozen=True):
    """A place in the log as people name it: by `sequence`, or by `time`."""

    sequence: int | None = None
    time: datetime | None = None


def parse_when(text: str, now: datetime) -> When:
    """Return the place meant; a bare number is a sequence, `10m` is ago.

    Raises:
        ValueError: it is none of the accepted forms, which the message names.
    """
    text = text.strip()
    if text.isdecimal() and text.isascii() and len(text) <= _SEQUENCE_DIGITS_MAX:
        return When(sequence=int(text))
    if text and (found := _AGO.fullmatch(text)):
        days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
        try:
            return When(time=now - timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds))
        except OverflowError:
            raise ValueError(f"{text!r} is before all time; use {WHEN_FORM}") from None
    try:
        time = datetime.fromisoformat(text)
        return When(time=(time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a time; use {WHEN_FORM}") from None


def parse_length(text: str) -> float:
    """Return seconds of `30s`, `10m`, `1h30m`.

    Raises:
        ValueError: it is none of these; the message names them.
    """
    found = _AGO.fullmatch(text.strip()) if text.strip() else None
    if found is None:
        raise ValueError(f"{text!r} is not a length of time; use 30s, 10m or 1h30m")
    days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
    return float(days * _DAY_S + hours * _HOUR_S + minutes * _MINUTE_S + seconds)


def age(seconds: float) -> str:
    """Return an age as 45s, 12m3s, 1h2m or 3d4h; two units at most, below zero as 0s."""
    total = max(0, int(seconds))
    if total < _MINUTE_S:
        return f"{total}s"
    if total < _HOUR_S:
        return f"{total // _MINUTE_S}m{total % _MINUTE_S}s"
    if total < _DAY_S:
        return f"{total // _HOUR_S}h{total % _HOUR_S // _MINUTE_S}m"
    return f"{total // _DAY_S}d{total % _DAY_S // _HOUR_S}h"


def since(then: datetime | None, now: datetime) -> str:
    """Return how long ago that was, `-` when it never was."""
    return "-" if then is None else age((now - then).total_seconds())


def moment(at: datetime | None) -> str:
    """Return a time in UTC to the millisecond, `-` when there is none."""
    if at is None:
        return "-"
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}Z"


def clock_time(at: datetime) -> str:
    """Return the time of day in UTC to the millisecond."""
    return f"{at.astimezone(UTC):%H:%M:%S}.{at.microsecond // 1000:03}"


def size(count: float) -> str:
    """Return bytes as 512 B, 1.5 MiB, 4.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the unit
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def safe(text: object) -> str:
    """Return text on one line that cannot move a cursor, change colours or hide itself."""
    return printable(str(text))


def safe_line(line: str) -> str:
    """Return a line a machine wrote: its colours left out, its tabs made spaces, the rest as `safe`."""
    return printable(_SGR.sub("", line).expandtabs(8).rstrip("\r\n"))


def labels_text(labels: tuple[str, ...]) -> str:
    """Return labels with commas, `-` when there are none."""
    return safe(",".join(labels)) or "-"

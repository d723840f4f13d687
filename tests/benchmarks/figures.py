"""What a benchmark finds: figures, each beside its baseline and its target, and the table they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

Met = Literal["yes", "NO", ""]


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured value. `baseline` is of the same run and the same unit; a target is on the ratio or the value.

    A baseline that could not be measured has no value, its name says why, and a target on the ratio is missed.
    `spread` has the lowest and the highest round. `scripted`: no machine was started, a driver only said so.
    """

    benchmark: str
    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    paired_ratio: float | None = None  # of rounds that took turns: the median of their own ratios
    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    ratio_below: float | None = None
    value_below: float | None = None
    spread: tuple[float, float] | None = None
    scripted: bool = False

    @property
    def ratio(self) -> float | None:
        """Return value over baseline, round by round where rounds were paired; None without a baseline."""
        if self.paired_ratio is not None:
            return self.paired_ratio
        return None if not self.baseline else self.value / self.baseline

    @property
    def target(self) -> str:
        """Return the target in words, empty when there is none."""
        if self.ratio_at_least is not None:
            return f"ratio >= {self.ratio_at_least:g}"
        if self.ratio_at_most is not None:
            return f"ratio <= {self.ratio_at_most:g}"
        if self.ratio_below is not None:
            return f"ratio < {self.ratio_below:g}"
        return "" if self.value_below is None else f"< {self.value_below:g} {self.unit}"

    @property
    def met(self) -> Met:
        """Tell whether the target is met; empty when there is none."""
        if self.ratio_at_least is not None:
            return "yes" if self.ratio is not None and self.ratio >= self.ratio_at_least else "NO"
        if self.ratio_at_most is not None:
            return "yes" if self.ratio is not None and self.ratio <= self.ratio_at_most else "NO"
        if self.ratio_below is not None:
            return "yes" if self.ratio is not None and self.ratio < self.ratio_below else "NO"
        if self.value_below is not None:
            return "yes" if self.value < self.value_below else "NO"
        return ""


def middle(rounds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of the rounds, and the lowest and highest."""
    return median(rounds), (min(rounds), max(rounds))


def paired(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios: what disturbed a round disturbed both sides of it."""
    return median(our / bare for our, bare in zip(ours, baseline, strict=True))


def percentile(values: Iterable[float], part: float) -> float:
    """Return the value that `part` (0 to 1) of the values do not exceed: the nearest rank, never between two."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def shown(value: float) -> str:
    """Return a value with about three digits that say something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}".rstrip("0").rstrip(".")


BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
"""The marks in the README between which the last full run's figures stand."""

HEADINGS = ("benchmark", "figure", "value", "rounds", "baseline", "ratio", "target", "met")


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as a table in Markdown; scripted ones say so."""
    rows = [HEADINGS, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def with_figures(text: str, report: str) -> str:
    """Return the text with the report in the place of the one between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no place for figures between {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{report}\n{end}{after}"


def _row(figure: Figure) -> tuple[str, ...]:
    ratio = figure.ratio
    return (
        figure.benchmark,
        figure.name + (" [scripted]" if figure.scripted else ""),
        f"{shown(figure.value)} {figure.unit}",
        "" if figure.spread is None else f"{shown(figure.spread[0])}..{shown(figure.spread[1])}",
        # Without a value the name alone: why there is none.
        figure.baseline_name
        if figure.baseline is None
        else f"{shown(figure.baseline)} ({figure.baseline_name})",
        "" if ratio is None else f"{ratio:.2f}",
        figure.target,
        figure.met,
    )

"""Where output goes: tables for people, the same without boxes and colours for pipes, JSON for programs."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from infra.cli.text import safe

T = TypeVar("T")
PHASE_STYLES = {
    "requested": "cyan",
    "starting": "cyan",
    "spawned": "blue",
    "registered": "green",
    "draining": "yellow",
    "failed": "red",
    "reaped": "dim",
    "open": "green",
    "paused": "yellow",
    "pass": "green",
    "warn": "yellow",
    "fail": "bold red",
}
_PROGRESS_STEP = 1000


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `whole`: never broken or cut, such as what is copied into the next command."""

    title: str
    right: bool = False
    whole: bool = False
    styled: bool = False  # in the colour of its word


class Output:
    """One command's output. With `as_json`, people's text is left out and every result is one JSON document."""

    def __init__(self, *, as_json: bool, console: Console | None = None) -> None:
        self.as_json = as_json
        self._console = console

    @property
    def terminal(self) -> bool:
        """Whether a person looks at stdout."""
        return self.console.is_terminal and not self.as_json

    @property
    def console(self) -> Console:
        """Stdout as it is now."""
        if self._console is None:
            self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        return self._console

    def document(self, value: object) -> None:
        """Print one JSON document, with everything outside ASCII escaped: safe on any terminal."""
        click.echo(json_text(value, indent=2))

    def json_line(self, value: object) -> None:
        """Print one JSON document on a line of its own."""
        click.echo(json_text(value))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line for people; `text` is made safe."""
        if self.terminal:
            self.console.print(Text(safe(text), style=style))
        else:
            click.echo(safe(text))

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr; nothing with `--json`."""
        if self.as_json:
            return
        console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        console.print(Text(safe(text), style="dim" if console.is_terminal else ""))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; cells are made safe. In a pipe nothing is ever broken or cut."""
        cells = [[safe(cell) for cell in row] for row in rows]
        if self.terminal:
            self._rich_table(columns, cells)
        else:
            self._plain_table(columns, cells)

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Print names and values below each other."""
        shown = [(name, safe(value)) for name, value in pairs]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            if self.terminal:
                text = Text(f"{name:<{width}}  ", style="bold")
                self.console.print(text.append(value, style=PHASE_STYLES.get(value, "not bold")))
            else:
                click.echo(f"{name:<{width}}  {value}".rstrip())

    def _rich_table(self, columns: Sequence[Column], cells: list[list[str]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=column.whole,
                overflow="fold",
            )
        for row in cells:
            table.add_row(
                *(
                    Text(cell, style=PHASE_STYLES.get(cell, "") if column.styled else "")
                    for column, cell in zip(columns, row, strict=True)
                )
            )
        self.console.print(table, soft_wrap=False)

    @staticmethod
    def _plain_table(columns: Sequence[Column], cells: list[list[str]]) -> None:
        titles = [column.title for column in columns]
        widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        for row in [titles, *cells]:
            parts = (
                cell.rjust(width) if column.right else cell.ljust(width)
                for column, cell, width in zip(columns, row, widths, strict=True)
            )
            click.echo("  ".join(parts).rstrip())

    def progressing(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """Yield the items, with a bar on stderr when a person looks at it."""
        console = Console(stderr=True)
        if self.as_json or not console.is_terminal or total < _PROGRESS_STEP:
            yield from items
            return
        with progress_bar(console) as progress:
            task = progress.add_task(what, total=total)
            for number, item in enumerate(items, 1):
                yield item
                if number % _PROGRESS_STEP == 0:
                    progress.update(task, completed=number)

    @contextmanager
    def counting(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Lend something to tell `(done, of all)`: a bar on stderr when a person looks at it, else nothing."""
        console = Console(stderr=True)
        if self.as_json or not console.is_terminal:
            yield lambda _done, _all: None
            return
        with progress_bar(console) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, everything: bar.update(task, completed=done, total=everything)


def progress_bar(console: Console) -> Progress:
    """Return a bar for counted work; it vanishes when the work is done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    )


def json_text(value: object, indent: int | None = None) -> str:
    """Return the JSON of a struct or of plain values."""
    return json.dumps(msgspec.to_builtins(value), indent=indent, allow_nan=False)


def print_error(kind: str, message: str, *, as_json: bool) -> None:
    """Say what went wrong: a sentence on stderr; with `--json` an object on stdout."""
    if as_json:
        body: dict[str, Any] = {"error": {"code": kind, "message": message}}
        click.echo(json.dumps(body, indent=2))
        return
    lines = [safe(line) for line in message.splitlines()] or ["(no message)"]
    click.echo("\n".join([f"fleetlog: {lines[0]}", *lines[1:]]), err=True)

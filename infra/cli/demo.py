"""`fleetlog demo`: see it work on real parts, with a crash in the middle."""

import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from events.envelope import Recorded
from infra.cli.command import json_option
from infra.cli.exits import CliError, ExitCode
from infra.cli.out import PHASE_STYLES, json_text
from infra.cli.story import said
from infra.cli.text import safe
from infra.demo.network import enter_own_network
from infra.demo.plays import Microvms, NotHere, Processes
from infra.demo.run import Demo, Report, remove
from projections.vm import VmState

_HELP = """See the main job on real parts, in under a minute.

Starts a coordinator with a NATS and a PostgreSQL of its own in a temporary folder, asks for six agents (one fails on
purpose, one never registers), kills the coordinator with SIGKILL in the middle, starts it again, and waits until every
life has come to its end. Exit code 0 only if nothing was lost, nothing is left on the host, and the tables agree with
the log.
"""

_FIGURES = (
    "agents_requested",
    "agents_reaped",
    "taken_up_again",
    "leaks",
    "verify_clean",
    "events",
    "demand_to_registered_ms_p50",
    "coordinator_down_ms",
    "took_s",
)
_CAUSE_WIDTH = 18
_OTHER_COLUMNS_WIDTH = 3 + 7 + 16 + _CAUSE_WIDTH + 4 * 2
_STEPS = {
    "vm.spawned": "runs",
    "vm.registered": "registered",
    "vm.taken_up": "taken up",
    "vm.draining": "done",
    "vm.failed": "failed",
}


@click.command(help=_HELP)
@click.option(
    "--backend",
    type=click.Choice(["bare-metal", "firecracker"]),
    default="bare-metal",
    show_default=True,
    help="Host processes, or jailed microVMs in a network namespace of their own (needs root, KVM and a clone).",
)
@click.option("--keep", is_flag=True, help="Keep the folder with log, tables and the coordinator's output.")
@json_option
@click.pass_context
def demo(ctx: click.Context, *, backend: str, keep: bool) -> int:
    """Run the demonstration; the help text is above."""
    as_json = bool(ctx.ensure_object(dict).get("json"))
    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False, soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="flt-demo-"))
    directory.chmod(0o711)  # a jailed process has to reach its root
    play = Processes() if backend == "bare-metal" else Microvms()
    began_s = time.monotonic()

    def tell(text: str) -> None:
        console.print(Text(f"{time.monotonic() - began_s:5.1f} s  ", style="dim").append(safe(text)))

    try:
        if isinstance(play, Microvms):
            play.prepare()  # from the namespace no package index can be reached
            enter_own_network()
        report = Demo(directory, play, tell).run()
    except NotHere as error:
        remove(directory)
        raise CliError(ExitCode.UNREACHABLE, "not-here", str(error)) from error
    except BaseException:
        console.print(
            f"the demonstration stopped; what it left to look at is in {directory}", style="bold red"
        )
        raise
    if as_json:
        figures = {name: getattr(report, name) for name in _FIGURES}
        ends = {
            report.jobs[life.id]: {"agent": life.id, "reason": life.reason, "exit_code": life.exit_code}
            for life in report.lives
        }
        click.echo(
            json_text(
                {
                    "ok": report.ok,
                    **figures,
                    "ends": ends,
                    "left": report.left,
                    "differences": report.differences,
                },
                indent=2,
            )
        )
    else:
        _show(console, report)
    if report.ok and not keep:
        remove(directory)
    else:
        console.print(f"\nkept for you to look at: {directory}")
    return int(ExitCode.OK if report.ok else ExitCode.FOUND)


def _show(console: Console, report: Report) -> None:
    console.print()
    console.print(Text("Six lives", style="bold"), Text("as the log has them", style="dim"))
    console.print(_lives(report), soft_wrap=False)
    longest = max(report.lives, key=lambda life: life.taken_up and life.version)
    console.print()
    console.print(
        Text(f"One of them, {report.jobs[longest.id]}", style="bold"),
        Text("why each step happened", style="dim"),
    )
    console.print(_timeline(report, longest, console.width), soft_wrap=False)
    console.print()
    for right, text in _verdicts(report):
        console.print(
            Text("  ok  " if right else "WRONG ", style="green" if right else "bold red").append(safe(text))
        )
    for line in (*report.left, *report.differences):
        console.print(Text(f"      {safe(line)}", style="red"))


def _lives(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("JOB", "ENDED", "CODE", "LIVED", "STEPS BETWEEN ASKED AND REAPED"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("CODE", "LIVED") else "left")
    for life in report.lives:
        lived_s = ((life.reaped_at or life.changed_at) - life.requested_at).total_seconds()
        table.add_row(
            report.jobs[life.id],
            Text(life.reason or "-", style="green" if life.reason == "job-complete" else "yellow"),
            "-" if life.exit_code is None else str(life.exit_code),
            f"{lived_s:.1f} s",
            _steps(report.facts, life),
        )
    return table


def _steps(facts: tuple[Recorded, ...], life: VmState) -> Text:
    text = Text()
    for fact in facts:
        if fact.aggregate == f"vm.{life.id}" and fact.tag in _STEPS:
            if text:
                text.append(" > ", style="dim")
            step = _STEPS[fact.tag]
            text.append(step, style="bold magenta" if fact.tag == "vm.taken_up" else "")
    return text


def _timeline(report: Report, life: VmState, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("SEQ", "AT", "FACT", "WHAT", "BECAUSE OF"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("SEQ", "AT") else "left")
    what_width = max(20, width - _OTHER_COLUMNS_WIDTH)
    for fact in report.facts:
        if fact.aggregate != f"vm.{life.id}":
            continue
        style = (
            "bold magenta" if fact.tag == "vm.taken_up" else PHASE_STYLES.get(fact.tag.partition(".")[2], "")
        )
        after_s = (fact.at - life.requested_at).total_seconds()
        cause = fact.cause.replace(f"vm.{life.id}:", "its version ")
        what, cause = (
            _cut(safe(text), most) for text, most in ((said(fact), what_width), (cause, _CAUSE_WIDTH))
        )
        table.add_row(str(fact.sequence), f"{after_s:.3f} s", Text(fact.tag, style=style), what, cause)
    return table


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _verdicts(report: Report) -> tuple[tuple[bool, str], ...]:
    p50 = report.demand_to_registered_ms_p50
    return (
        (
            report.agents_reaped == report.agents_requested,
            f"{report.agents_reaped} of {report.agents_requested} lives ended and confirmed gone",
        ),
        (
            report.taken_up_again > 0,
            f"{report.taken_up_again} machines outlived the coordinator and were taken up again ({report.coordinator_down_ms:.0f} ms down)",
        ),
        (
            report.leaks == 0,
            f"{report.leaks} leaks: processes, cgroups and folders looked for on the host itself",
        ),
        (report.verify_clean, "verify: the tables and the host agree with the log, row by row"),
        (
            report.ok,
            f"{report.events} facts in the log; demand to registered {'-' if p50 is None else f'{p50:.0f} ms'} (median); {report.took_s:.1f} s in all",
        ),
    )

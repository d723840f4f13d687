"""`fleetlog demand`: asks for agents, says what became of each, and with `--wait` follows them until they are in."""

import time
from collections.abc import Callable
from contextlib import nullcontext

import click
import msgspec
from rich.console import Console

from actors.commands import Answer
from actors.decisions.resources import declared
from events import subjects
from events.envelope import Recorded
from events.vm import Draining, Failed, Reaped, Registered
from infra.api.messages import DemandAnswer, DemandRequest, Needs
from infra.cli.agent import operator
from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import LABELS, LENGTH, NAME, SIZE
from infra.cli.live import LiveFacts
from infra.cli.out import Column, Output
from infra.cli.session import Session
from infra.cli.story import said
from infra.cli.text import age

GIVEN = ("spawning", "existing")
_LOOK_S = 0.2

_EPILOG = """\b
Answers, one for each agent wanted:
  spawning     a machine is on its way
  existing     this job's earlier demand got this machine, and it lives
  at-capacity  a cap is reached; the message names it
  no-backend   no scaler has these labels; the message names those there are
  refused      paused, draining or the like; the message says why
  skipped      the scaler backs off after failures
Exit code 1 when not every agent was given.
"""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an agent that was waited for."""

    vm: str
    outcome: str  # registered, or ended before it was
    detail: str
    after_s: float

    @property
    def good(self) -> bool:
        """Whether its agent came."""
        return self.outcome == "registered"


@click.command(epilog=_EPILOG)
@click.option("--labels", "-l", type=LABELS, required=True, help="What its jobs ask for: linux,small.")
@click.option("--exclude", type=LABELS, default="", help="Labels it must not have.")
@click.option("--count", "-n", type=click.IntRange(1, 100), default=1, show_default=True, help="How many.")
@click.option("--job", help="The job it is for: asking again for a job is the same demand.")
@click.option("--run", help="The run the job belongs to.")
@click.option("--cpus", type=click.FloatRange(0, 1024), help="Cores each needs and may use at most.")
@click.option("--memory", type=SIZE, help="Memory each needs and may use at most: 512m, 1.5g.")
@click.option("--coordinator", type=NAME, help="Ask this one; else any that runs.")
@click.option("--wait", is_flag=True, help="Until each agent registered, or ended.")
@click.option(
    "--timeout", "timeout_s", type=LENGTH, default="10m", show_default=True, help="How long to wait."
)
@with_session
def demand(
    session: Session,
    *,
    labels: tuple[str, ...],
    exclude: tuple[str, ...],
    count: int,
    job: str | None,
    run: str | None,
    cpus: float | None,
    memory: int | None,
    coordinator: str | None,
    wait: bool,
    timeout_s: float,
) -> int:
    """Ask for agents; answered at once, as soon as the log has the decision."""
    if job is not None and count != 1:
        raise click.UsageError(f"--job with --count {count}: a job gets one agent")
    both = declared(cpus, memory)
    needs = Needs(cpus=both.cpus, memory_bytes=both.memory_bytes)
    request = DemandRequest(
        labels=labels,
        exclude=exclude,
        count=count,
        job=job,
        run=run,
        requests=needs,
        limits=needs,
        by=operator(),
    )
    after = session.journal.headroom().last_sequence if wait else 0
    api = session.api
    answer = api.demand(request) if coordinator is None else api.demand_of(coordinator, request)
    if not session.out.as_json:
        _show(session.out, answer)
    fates: tuple[Fate, ...] = ()
    if wait:
        fates = await_agents(session, answer, after, timeout_s)
    if session.out.as_json:
        session.out.document(msgspec.to_builtins(answer) | ({"waited": fates} if wait else {}))
    given = all(each.kind in GIVEN for each in answer.answers)
    return ExitCode.OK if given and all(fate.good for fate in fates) else ExitCode.FOUND


def _show(out: Output, answer: DemandAnswer) -> None:
    given = [each for each in answer.answers if each.kind in GIVEN]
    if given:
        columns = [Column(title="ANSWER"), Column(title="AGENT", whole=True), Column(title="SCALER")]
        out.table(columns, [(each.kind, each.vm, each.scaler or "-") for each in given])
    others: dict[str, int] = {}
    for each in answer.answers:
        if each.kind not in GIVEN:
            line = _refusal(each)
            others[line] = others.get(line, 0) + 1
    for line, times in others.items():
        out.line(line if times == 1 else f"{line} ({times} times)", style="yellow")


def _refusal(answer: Answer) -> str:
    again = "" if answer.retry_after_s is None else f"; ask again in {age(answer.retry_after_s + 0.999)}"
    cap = f" ({answer.cap})" if answer.cap else ""
    return f"{answer.kind}{cap}: {answer.message}{again}"


def await_agents(session: Session, answer: DemandAnswer, after: int, timeout_s: float) -> tuple[Fate, ...]:
    """Follow the log from before the demand until each agent registered or ended.

    Raises:
        CliError: not all within `timeout_s`.
    """
    # One that existed already may have registered long before: its own facts tell.
    open_vms = dict.fromkeys(each.vm for each in answer.answers if each.vm is not None)
    began = time.monotonic()
    fates: list[Fate] = []

    def look(fact: Recorded) -> None:
        vm = fact.aggregate.removeprefix("vm.")
        if vm not in open_vms or not fact.aggregate.startswith("vm."):
            return
        after_s = round(time.monotonic() - began, 3)
        if not isinstance(fact.event, Registered | Draining | Failed | Reaped):
            return
        del open_vms[vm]
        fates.append(Fate(vm=vm, outcome=fact.tag.partition(".")[2], detail=said(fact), after_s=after_s))
        session.out.note(f"{vm} {fates[-1].outcome} after {after_s:.1f}s: {fates[-1].detail}")

    for each in answer.answers:
        if each.kind == "existing" and each.vm is not None:
            for fact in session.journal.read(subjects.vm(each.vm)):
                look(fact)
    if open_vms:
        _follow(session, after, look, lambda: len(open_vms), began + timeout_s)
    if open_vms:
        raise CliError(
            ExitCode.TIMEOUT,
            "timeout",
            f"neither registered nor ended within {age(timeout_s)}: {len(open_vms)} of {len(open_vms) + len(fates)}, "
            f"{', '.join(list(open_vms)[:5])}; `fleetlog agent describe` shows how far they are",
        )
    return tuple(fates)


def _follow(
    session: Session, after: int, look: Callable[[Recorded], None], left: Callable[[], int], deadline: float
) -> None:
    console = Console(stderr=True)
    silent = session.out.as_json or not console.is_terminal
    with LiveFacts(session.journal.follow, after) as facts:
        shown = nullcontext() if silent else console.status(_waiting(left()))
        with shown as status:
            while left() and (wait_s := deadline - time.monotonic()) > 0:
                fact = facts.next(min(_LOOK_S, wait_s))
                if fact is not None:
                    look(fact)
                    if status is not None:
                        status.update(_waiting(left()))


def _waiting(count: int) -> str:
    return f"waiting for {count} agent{'' if count == 1 else 's'}"

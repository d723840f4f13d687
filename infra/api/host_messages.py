"""The requests about what runs, and what is left, on a coordinator's host, and their answers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from actors.decisions.reclaim import LiveMachine
from actors.sweep import Report, Stopped
from infra.api.request import Id, Request, Text


class LiveRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host.live`: every machine that runs on the coordinator's host, and whether anybody accounts for it."""


class StopRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host.stop`: end these machines, as far as they provably run and nobody accounts for them.

    What was not reached within `timeout_s` is answered as an error.
    """

    vms: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=100)]
    timeout_s: Annotated[float, Meta(ge=1, le=240)] = 30.0
    by: Text = ""


class SweepRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`host.sweep`: take away what is provably the coordinator's, dead, and owed to nobody; `dry_run`: only say it."""

    dry_run: bool = False
    timeout_s: Annotated[float, Meta(ge=1, le=240)] = 30.0


class LiveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every machine once, whoever's; `status` `orphaned` alone may be stopped."""

    machines: tuple[LiveMachine, ...]
    host: str = ""
    coordinator: str = ""
    version: Literal[1] = 1


class StopAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One result for each machine named, in that order, each once."""

    results: tuple[Stopped, ...]
    coordinator: str = ""
    version: Literal[1] = 1


class SweepFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one thing on the host."""

    kind: str
    name: str
    outcome: str
    why: str
    vm: str | None = None


class SweepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was accounted for is not in it. `unlisted`: listings that failed, of which nothing was concluded."""

    findings: tuple[SweepFinding, ...]
    unlisted: tuple[str, ...] = ()
    host: str = ""
    coordinator: str = ""
    version: Literal[1] = 1


def sweep_findings(report: Report) -> tuple[SweepFinding, ...]:
    """Return a sweep's findings as they travel."""
    return tuple(
        SweepFinding(
            kind=each.leftover.kind,
            name=each.leftover.name,
            vm=each.leftover.vm,
            outcome=each.outcome,
            why=each.why,
        )
        for each in report.findings
    )

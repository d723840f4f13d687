"""Reclaiming on one host, step by step: list, ask the log, decide, take away; and the living that an operator names."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from actors.decisions.reclaim import (
    NETWORK_KINDS,
    Known,
    LiveMachine,
    Standing,
    Verdict,
    classify,
    judge,
    machine_places,
)
from actors.errors import DriverError, Refused
from actors.reclaiming import Leftover, Reclaiming
from events.subjects import VM_ID

logger = logging.getLogger(__name__)

Outcome = Literal["reaped", "failed", "spared", "would-reap"]


class Ledger(Protocol):
    """What is known of machines and addresses at this moment."""

    def standing(self, vm: str) -> Standing:
        """Return what the log says of a machine; never raises."""
        ...

    def withholding(self, addresses: frozenset[str]) -> AbstractContextManager[frozenset[str] | None]:
        """Give the addresses held, read now; none of `addresses` is given away meanwhile. None: not known."""
        ...


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one orphan, or of what may be one."""

    leftover: Leftover
    outcome: Outcome
    why: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One sweep. `unlisted` says which listings failed: nothing is concluded of what they would have shown."""

    findings: tuple[Finding, ...] = ()
    unlisted: tuple[str, ...] = ()

    def counts(self, outcome: Outcome) -> Mapping[str, int]:
        """Return how many there were, by kind."""
        return Counter(each.leftover.kind for each in self.findings if each.outcome == outcome)


StopOutcome = Literal["stopped", "tracked", "unverified", "not-live", "not-found", "error"]


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one machine that an operator named."""

    vm: str
    outcome: StopOutcome
    detail: str


class Sweeper:
    """Reclaims on one host for one coordinator. Not to be used from two threads at once: see `actors.host`.

    `reach` is called between steps, so that tests can crash there.
    """

    def __init__(
        self, owner: str, sources: Sequence[Reclaiming], reach: Callable[[str], None] = lambda _: None
    ) -> None:
        self._owner = owner
        self._sources = tuple(sources)
        self._reach = reach

    def sweep(self, ledger: Ledger, *, dry_run: bool = False) -> Report:
        """Take away what is provably ours, dead, and owed to nobody; return what was done about each.

        The host is looked at twice, and the log asked in between: what began or ended meanwhile is no orphan. That a
        life is over, or was never begun under an id that is never used again, stays true.
        """
        listing, unlisted = self._list()
        self._reach("reclaim.listed")
        things = [each for each, _ in listing]
        standing = self._standing(things, ledger)
        addresses = frozenset(each.address for each in things if each.address and each.kind in NETWORK_KINDS)
        with ledger.withholding(addresses) as leased:
            known = Known(owner=self._owner, standing=standing, leased=leased, whole=not unlisted)
            suspects = {_key(each.leftover) for each in judge(things, known) if each.action != "keep"}
            if not suspects:
                return Report(unlisted=unlisted)
            report = self._act_on(suspects, known, dry_run=dry_run)
        return msgspec.structs.replace(report, unlisted=tuple(dict.fromkeys((*unlisted, *report.unlisted))))

    def _act_on(self, suspects: set[tuple[str, str]], known: Known, *, dry_run: bool) -> Report:
        listing, unlisted = self._list()
        known = msgspec.structs.replace(known, whole=known.whole and not unlisted)
        sources = {_key(each): source for each, source in listing}
        verdicts = judge((each for each, _ in listing), known)
        self._reach("reclaim.decided")
        findings = tuple(
            self._act(verdict, sources[_key(verdict.leftover)], dry_run=dry_run)
            for verdict in verdicts
            if verdict.action != "keep" and _key(verdict.leftover) in suspects
        )
        return Report(findings=findings, unlisted=unlisted)

    def live(self, ledger: Ledger) -> tuple[LiveMachine, ...]:
        """Return every machine that runs here, whoever's.

        Raises:
            DriverError: the host could not be listed.
        """
        listing, unlisted = self._list()
        if unlisted:
            raise DriverError("unknown", "; ".join(unlisted), transient=True)
        places = machine_places(each for each, _ in listing)
        known = self._known(places, ledger)
        return tuple(classify(each, known) for each in places)

    def stop(self, vm: str, ledger: Ledger) -> Stopped:
        """End one living machine that nobody accounts for, and take away what is left of it."""
        listing, unlisted = self._list()
        mine = [(each, source) for each, source in listing if each.vm == vm]
        if not mine:
            partial = f" (not everything could be listed: {'; '.join(unlisted)})" if unlisted else ""
            return Stopped(
                vm=vm, outcome="not-found", detail=f"nothing of a machine of this name is here{partial}"
            )
        places = machine_places(each for each, _ in mine)
        if not places:
            return Stopped(vm=vm, outcome="not-live", detail=mine[0][0].evidence)
        (place,) = places
        machine = classify(place, self._known((place,), ledger))
        if machine.status != "orphaned":
            return Stopped(vm=vm, outcome=machine.status, detail=machine.why)
        source = next(source for each, source in mine if each is place)
        return self._stop(place, source, ledger)

    def reap_unowned(self, vm: str, ledger: Ledger) -> bool:
        """Be rid of a machine that its caller has proven to be nobody's, alive or dead; return whether it is gone.

        What is not on this host, not provably the machine, or accounted for by the log is left alone.
        """
        stopped = self.stop(vm, ledger)
        if stopped.outcome == "not-live":
            report = self.sweep(ledger)
            return any(each.leftover.vm == vm and each.outcome == "reaped" for each in report.findings)
        logger.info("%s, said to be nobody's: %s (%s)", vm, stopped.outcome, stopped.detail)
        return stopped.outcome == "stopped"

    def _stop(self, place: Leftover, source: Reclaiming, ledger: Ledger) -> Stopped:
        vm = place.vm or ""

        def accounted() -> str:
            return "" if ledger.standing(vm) in ("absent", "reaped") else "the log accounts for it now"

        try:
            detail = source.stop(place, accounted)
        except Refused as refused:
            outcome: StopOutcome = "error"
            if refused.code in ("tracked", "unverified", "not-live"):
                outcome = refused.code  # type: ignore[assignment]  # one of the three just named
            return Stopped(vm=vm, outcome=outcome, detail=str(refused))
        except DriverError as error:
            return Stopped(vm=vm, outcome="error", detail=str(error))
        return Stopped(vm=vm, outcome="stopped", detail=detail)

    def _act(self, verdict: Verdict, source: Reclaiming, *, dry_run: bool) -> Finding:
        what, why = verdict.leftover, verdict.why
        if verdict.action == "spare":
            return Finding(leftover=what, outcome="spared", why=f"{why}: {what.evidence}")
        if dry_run:
            return Finding(leftover=what, outcome="would-reap", why=f"{why}: {what.evidence}")
        try:
            evidence = source.reclaim(what)
        except DriverError as error:
            return Finding(leftover=what, outcome="failed", why=f"{why}; {error}")
        self._reach(f"reclaim.{what.kind}")
        return Finding(leftover=what, outcome="reaped", why=f"{why}: {evidence}")

    def _list(self) -> tuple[list[tuple[Leftover, Reclaiming]], tuple[str, ...]]:
        """Return everything there is, each once, with who can take it away; and which listings failed."""
        found: dict[tuple[str, str], tuple[Leftover, Reclaiming]] = {}
        unlisted: list[str] = []
        for source in self._sources:
            try:
                for each in source.leftovers():
                    found.setdefault(_key(each), (each, source))
            except DriverError as error:
                unlisted.append(str(error))
        return list(found.values()), tuple(dict.fromkeys(unlisted))

    def _known(self, things: Iterable[Leftover], ledger: Ledger) -> Known:
        return Known(owner=self._owner, standing=self._standing(things, ledger), leased=None)

    def _standing(self, things: Iterable[Leftover], ledger: Ledger) -> dict[str, Standing]:
        ours = (self._owner, None)
        vms = sorted({each.vm for each in things if each.vm is not None and each.owner in ours})
        return dict(_asked(vms, ledger))


def _key(leftover: Leftover) -> tuple[str, str]:
    return (leftover.kind, leftover.name)


def _asked(vms: Iterable[str], ledger: Ledger) -> Iterator[tuple[str, Standing]]:
    for vm in vms:
        # Whoever made something of another name, it was not us.
        yield vm, ledger.standing(vm) if VM_ID.fullmatch(vm) else "unread"


def say(report: Report, why: str) -> None:
    """Log what a sweep did, one line for each thing it did not merely pass."""
    for each in report.findings:
        what = f"{each.leftover.kind} {each.leftover.name}"
        level = logging.INFO if each.outcome == "reaped" else logging.WARNING
        logger.log(level, "sweep (%s): %s %s: %s", why, each.outcome, what, each.why)
    for failed in report.unlisted:
        logger.warning("sweep (%s): a listing failed, nothing follows from it: %s", why, failed)

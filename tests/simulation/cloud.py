"""A provisioner and its cloud, as the simulation moves them: told by the log at least once, answering when chance lets it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from actors.commands import ReportProvision, Verdict
from events.envelope import Recorded
from events.scale import Down, Up
from infra.journal.memory import MemoryJournal

TARGET = "acme"
Report = Callable[[ReportProvision], list[Any]]
"""Sends an answer to the coordinator; the list gets its reply, or never."""


class VirtualCloud:
    """What one target's provisioner has running, and what of the log it has yet to acknowledge."""

    def __init__(self, journal: MemoryJournal, chance: random.Random, report: Report) -> None:
        self._journal = journal
        self._chance = chance
        self._report = report
        self._read = 0
        self._left: dict[str, list[Recorded]] = {}
        self._asked: dict[str, list[Any]] = {}  # by the vm: the reply that is waited for
        self.running: set[str] = set()
        self.started: list[str] = []
        self.diligent = False
        """Answer truthfully and at once."""

    def work(self) -> bool:
        """Take one step: learn of a fact, handle one, or hear a reply; False when there is nothing to do."""
        self._learn()
        if not self._left:
            return False
        vm = self._chance.choice(sorted(self._left))
        if (reply := self._asked.get(vm)) is not None:
            if not reply and not self.diligent:
                del self._asked[vm]  # no reply: redelivered
                return True
            if reply and not isinstance(reply[0], BaseException):
                self._acknowledge(vm)
                return True
        self._handle(vm, self._left[vm][0])
        return True

    def end(self, vm: str) -> None:
        """Let a machine disappear, as a spot instance does."""
        self.running.discard(vm)
        self._say(vm, "terminated")

    def _learn(self) -> None:
        for fact in self._journal.replay(self._read):
            self._read = fact.sequence
            if isinstance(fact.event, Up | Down) and fact.event.target == TARGET:
                self._left.setdefault(fact.event.agent, []).append(fact)

    def _handle(self, vm: str, fact: Recorded) -> None:
        match fact.event:
            case Up() if self._chance.random() < 0.2 and vm not in self.started:
                self._asked[vm] = self._say(vm, "failed")
            case Up() if self._chance.random() < 0.1 and vm not in self.started and not self.diligent:
                self._acknowledge(vm)  # it forgets about it, and nobody hears of it again
            case Up():
                if vm not in self.started:
                    self.started.append(vm)
                    self.running.add(vm)
                self._asked[vm] = self._say(vm, "accepted")
            case _:
                self.running.discard(vm)
                self._asked[vm] = self._say(vm, "terminated")

    def _say(self, vm: str, verdict: Verdict) -> list[Any]:
        return self._report(ReportProvision(vm=vm, target=TARGET, verdict=verdict))

    def _acknowledge(self, vm: str) -> None:
        self._asked.pop(vm, None)
        self._left[vm].pop(0)
        if not self._left[vm]:
            del self._left[vm]

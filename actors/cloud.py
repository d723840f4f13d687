"""What is done to a machine that only its provisioners can see: they are told in the log, and their answers waited for."""

import logging

from actors.decisions.scale import Last, Terms, answer_by, unconfirmed
from actors.decisions.vm import NoteTornDown, NoteUnanswered
from actors.errors import LogUnavailable
from actors.ports import Ids
from actors.world import Call, Due, World
from events import subjects
from events.vm import Handle
from projections.vm import VmState

logger = logging.getLogger(__name__)

READ_AGAIN_S = 5.0
"""How soon a log that could not say what was offered last is asked again."""


def claim_code(ids: Ids) -> str:
    """Return a new claim code: 256 random bits as 64 hex digits [7.2]."""
    return ids.random() + ids.random()


class CloudMachine:
    """The effects of a cloud machine's actor, in the place of a host's `Machine`.

    Starting and ending one is a fact, stored with the step that leads to it: nothing is left to be sent, to fail or to
    be forgotten. What remains is to ask again when nobody confirms the end.
    """

    flight = None
    """No thread is ever at it."""

    def __init__(self, world: World, terms: Terms, vm: str) -> None:
        self._world = world
        self._terms = terms
        self._vm = vm
        self.tearing_down = False

    def spawn(self, state: VmState) -> None:
        """Nothing: `scale.up` is in the log, with its turn."""

    def watch(self, state: VmState, handle: Handle) -> None:
        """Nothing: its end is told by its provisioner, or by its agent's silence."""

    def clear_bootstrap(self, state: VmState) -> None:
        """Nothing: its claim code is spent."""

    def inspect(self, state: VmState) -> None:
        """Nothing: there is no host to look at."""

    def tear_down(self, state: VmState, handle: Handle | None) -> None:
        """Wait for the provisioners' word, and when it is overdue find out what to offer again.

        Raises:
            Refused: no room to read the log now; to be tried again.
        """
        del handle
        world = self._world
        if state.started_at is None:
            evidence = "no provisioner was asked for it"
            world.router.tell_vm(self._vm, Call(NoteTornDown(evidence=evidence), cause=self._cause(state)))
            return
        left_s = (answer_by(state, self._terms) - world.clock.now()).total_seconds()
        if left_s > 0:
            self._again(left_s)
            return
        self.tearing_down = True
        try:
            world.reads.submit(lambda: self._find_offers(state))
        except BaseException:
            self.tearing_down = False
            raise

    def _find_offers(self, state: VmState) -> None:
        """Read what each target was told last: the next offer follows it."""
        targets = unconfirmed(state)
        offered: dict[str, Last] = {}
        try:
            for target in targets:
                facts = self._world.journal.read(subjects.scale_down(target, state.scaler, state.id))
                offered[target] = Last(facts[-1].version, facts[-1].sequence) if facts else Last(0, 0)
        except LogUnavailable as error:
            logger.warning("the end of %s cannot be offered again yet: %s", state.id, error)
            self.tearing_down = False
            self._again(READ_AGAIN_S)
            return
        detail = f"not confirmed by {', '.join(targets)} within {self._terms.teardown_timeout_s:g} s"
        note = NoteUnanswered(detail=detail, offered=offered, retry_in_s=self._terms.teardown_timeout_s)
        self._world.router.tell_vm(self._vm, Call(note, cause=self._cause(state)))

    def _again(self, delay_s: float) -> None:
        router, vm = self._world.router, self._vm
        self._world.timers.set(f"{vm}:teardown", delay_s, lambda: router.tell_vm(vm, Due("teardown")))

    def _cause(self, state: VmState) -> str:
        return f"{subjects.vm(state.id)}:{state.version}"

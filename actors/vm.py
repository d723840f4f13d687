"""The actor of one machine: which decision, and which effect follows from which fact."""

import logging
from datetime import datetime, timedelta
from typing import Any

from actors.aggregate import Aggregate, Proposal
from actors.cloud import CloudMachine, claim_code
from actors.commands import RegisterAgent, Registration
from actors.decisions import scale
from actors.decisions.capacity import ScalerRules
from actors.decisions.recovery import Action
from actors.decisions.vm import (
    End,
    NoteDeadline,
    NoteExit,
    NoteGone,
    NoteSilence,
    NoteSpawned,
    NoteSpawnFailed,
    NoteTeardownFailed,
    NoteTornDown,
    NoteUnanswered,
    TakeUp,
    decide,
)
from actors.driver import Found
from actors.errors import Refused
from actors.machine import Machine, Resume
from actors.ports import NewFact, following
from actors.silence import Silence
from actors.world import Call, Due, Enlist, World
from events import subjects
from events.envelope import Recorded
from events.vm import (
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Reason,
    Registered,
    Requested,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownFailed,
    VmEvent,
)
from projections.vm import VmState, deadline, evolve

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""How soon a host that could not say what it holds is asked again."""

ABORT_GRACE_S = 30.0
"""How long a teardown waits for a spawn that was called off; after that it goes ahead beside it."""

DEADLINE_AGAIN_S = 1.0
"""How soon a passed deadline is looked at again, should the log not take its fact at once."""

LEAVE_GRACE_S = 2.0
"""How long an agent that said done may take to leave by itself before it is taken down."""

STOP_GRACE_S = 5.0
"""What an agent is given between being told to stop and SIGTERM reaching it by the driver."""


class VmActor(Aggregate):
    """One machine from its request until nothing of it is left. Ends itself with `vm.reaped`."""

    def __init__(self, world: World, state: VmState) -> None:
        super().__init__(world)
        self.state = state
        self._silence = Silence(world, self.rules, state.id)
        self._early: Call | None = None  # a registration that came before the driver had answered
        self._late_handle: Handle | None = None  # of a spawn that came up after its life was over
        self._machine: Machine | CloudMachine
        if (terms := self.rules.terms) is None:
            self._machine = Machine(world, world.drivers[state.slot], state.id)
        else:
            self._machine = CloudMachine(world, terms, state.id)
        self._anchor(world.clock.now())

    # Decisions.

    def resolve(self, call: Call) -> Proposal | None:
        """Decide by the pure function; a registration ahead of its `vm.spawned` waits for it."""
        early = self.state.phase == "starting" and self.rules.terms is None
        if isinstance(call.command, RegisterAgent) and early:
            if self._early is not None and self._early.reply is not None:
                self._early.reply(Refused("not-started", "another registration came after this one"))
            self._early = call
            return None
        events = decide(self.state, call.command)
        self._note_without_fact(call.command)
        state = self.state
        facts = following(subjects.vm(state.id), state.version, state.sequence, events)
        facts += self._told_with(call.command, events)
        result = self._registration() if isinstance(call.command, RegisterAgent) else None
        return Proposal(facts=facts, result=result, teardown=True)

    def _told_with(self, command: Any, events: tuple[VmEvent, ...]) -> tuple[NewFact, ...]:
        """Return what the provisioners of a cloud machine are told in the same batch."""
        terms, state, now = self.rules.terms, self.state, self.world.clock.now()
        if terms is None or not events:
            return ()
        if isinstance(events[0], SpawnStarted):
            return scale.offer(state.id, state, terms, claim_code(self.world.ids), now)
        if isinstance(command, NoteUnanswered):
            return scale.withdraw_again(state, command.offered, terms, now)
        return scale.withdraw(state, events, terms, now)

    def _registration(self) -> Registration:
        state = self.state
        return Registration(
            vm=state.id,
            labels=state.agent_labels or state.labels,
            gate=state.gate,
            job=state.job,
            run=state.run,
            beat_every_s=self.rules.beat_every_s,
        )

    def _note_without_fact(self, command: Any) -> None:
        """Take what a command says beside the facts it leads to."""
        match command:
            case NoteSpawned(handle=handle) if self.state.ended:
                self._late_handle = handle
                self._tear_down()
            case NoteSpawnFailed() if self.state.ended:
                self._tear_down()
            case NoteExit() if self.state.ended:
                self._tear_down()  # it left by itself; nothing to wait for
            case NoteTornDown() | NoteTeardownFailed() | NoteUnanswered():
                self._machine.tearing_down = False
            case _:
                pass

    def apply(self, facts: tuple[Recorded, ...], *, ours: bool = True) -> None:
        """Evolve, tell the others, then begin what follows; what provisioners are told is for them alone."""
        facts = tuple(fact for fact in facts if fact.aggregate == subjects.vm(self.state.id))
        for fact in facts:
            self.state = evolve(self.state, fact.event, fact)
        self._anchor(self.world.clock.now())
        self.world.router.publish(facts, self.actor_ref)
        for fact in facts:
            self._act(fact, ours=ours)

    def first_cause(self) -> str:
        """Return the demand the machine was requested for: all of its life is one chain."""
        return self.state.demand or ""

    def aggregates(self, call: Call) -> tuple[str, ...]:
        """Return its own: a machine decides about nothing else."""
        del call
        return (subjects.vm(self.state.id),)

    def rehydrate(self, read: dict[str, tuple[Recorded, ...]]) -> None:
        """Take up the facts that others appended, and act on them as on our own; but never spawn beside them."""
        missed = tuple(f for f in read[subjects.vm(self.state.id)] if f.version > self.state.version)
        if missed:
            self.apply(missed, ours=False)

    def observe(self, fact: Recorded) -> None:
        """Follow a fact an operator's front door or another coordinator appended."""
        if fact.version == self.state.version + 1:
            self.apply((fact,), ours=False)

    # Messages that are no commands.

    def receive(self, message: Any) -> None:
        """Handle what only this actor knows: how to go on, and timers."""
        match message:
            case Resume(action=what, found=found):
                self._resume(what, found)
            case Due(what="deadline"):
                self._tell_self(NoteDeadline(now=self._now()))
                self._arm_deadline(at_least_s=DEADLINE_AGAIN_S)
            case Due(what="turn"):
                if self.state.phase == "requested":
                    self._enlist()
            case Due(what="silence"):
                self._look_for_silence()
            case Due(what="inspect"):
                self._inspect()
            case Due(what="teardown"):
                self._tear_down()
            case Due(what="spawn-hangs"):
                self._tear_down(beside_spawn=True)
            case _:
                super().receive(message)

    def _resume(self, what: Action, found: Found | None) -> None:
        self._arm_deadline()
        self._carry_out_verdict()
        match what:
            case "wait-turn" if self.state.phase != "requested":
                pass  # a scaler's actor started again and asks who waits; this one does not
            case "wait-turn":
                self._enlist()
            case "spawn":
                self._spawn()
            case "take-up":
                assert found is not None, "a machine is taken up by what was found of it"
                handle = found.handle or self.state.handle
                site = self.world.site
                self._tell_self(TakeUp(coordinator=site.coordinator, handle=handle, evidence=found.evidence))
            case "fail-gone" | "fail-half-made":
                self._tell_self(self._gone(what, found))
            case "tear-down":
                self._tear_down()
            case "ask-again":
                self._listen()
                self._set_timer("inspect", ASK_AGAIN_S)
            case "listen":
                self._listen()
            case "nothing" | "report":
                pass

    def _enlist(self) -> None:
        """Ask for a turn, and ask again until it comes: the scaler's actor may die with the question in its mailbox."""
        self.world.router.tell_backend(self.state.slot, Enlist(self.state.id))
        self._set_timer("turn", ASK_AGAIN_S)

    def _gone(self, what: Action, found: Found | None) -> NoteGone:
        evidence = found.evidence if found is not None else "not looked at"
        if self.state.boot_id != self.world.site.boot_id:
            return NoteGone(reason="host-rebooted", detail=f"boot id changed since the request: {evidence}")
        if what == "fail-half-made":
            return NoteGone(reason="launch-failed", detail=f"half made when we restarted: {evidence}")
        reason: Reason = "exited" if self.state.phase == "registered" else "exited-early"
        return NoteGone(reason=reason, detail=f"gone when we restarted: {evidence}")

    # Effects.

    def _act(self, fact: Recorded, *, ours: bool) -> None:
        match fact.event:
            case Requested():
                pass
            case SpawnStarted():
                self.world.timers.cancel(self._key("turn"))
                self._arm_deadline()
                if ours:
                    self._spawn()
                else:  # whoever wrote it spawns; if that was a dead actor of this process, the host shows nothing
                    self._set_timer("inspect", ASK_AGAIN_S)
            case Spawned(handle=handle):
                self._machine.watch(self.state, handle)
                self._arm_deadline()
                self._answer_early()
            case TakenUp():
                if self.state.handle is not None:
                    self._machine.watch(self.state, self.state.handle)
                self._listen()
            case Registered():
                self.world.timers.cancel(self._key("deadline"))
                self._listen()
            case ConfigAcked():
                self._machine.clear_bootstrap(self.state)
            case Draining(reason=reason) | Failed(reason=reason):
                self._end_work(reason)
            case Condemned():
                self._carry_out_verdict()
            case TeardownFailed(retry_in_s=retry_in_s):
                self._set_timer("teardown", retry_in_s)
            case Reaped():
                self._bury()
            case _:
                pass

    def _carry_out_verdict(self) -> None:
        """End a machine that somebody condemned; who has the duty does it, whoever judged."""
        verdict = self.state.condemned
        if verdict is not None and not self.state.ended:
            self._tell_self(End(reason=verdict, detail=f"condemned by {self.state.condemned_by}"))

    def _end_work(self, reason: str) -> None:
        """Stop what runs for a life that is over, and take the machine down."""
        self.world.router.sessions.pop(self.state.id, None)
        self.world.router.heard_s.pop(self.state.id, None)
        for timer in ("deadline", "silence", "inspect", "turn"):
            self.world.timers.cancel(self._key(timer))
        self._answer_early()
        if self.state.registered_at is not None and reason in ("operator", "drain", "shutdown"):
            self.world.link.stop(self.state.id, reason, STOP_GRACE_S)
        if reason == "job-complete":
            self._set_timer("teardown", LEAVE_GRACE_S)
        else:
            self._tear_down()

    def _bury(self) -> None:
        for timer in ("deadline", "silence", "teardown", "inspect", "spawn-hangs"):
            self.world.timers.cancel(self._key(timer))
        router = self.world.router
        router.vms.pop(self.state.id, None)
        router.heard_s.pop(self.state.id, None)
        router.slots.pop(self.state.id, None)
        self.stop()

    def _spawn(self) -> None:
        try:
            self._machine.spawn(self.state)
        except Refused as refused:
            self._tell_self(NoteSpawnFailed(kind="exhausted", detail=str(refused), transient=True))

    def _tear_down(self, *, beside_spawn: bool = False) -> None:
        """Begin the teardown, unless one runs or a spawn of the same machine has yet to end.

        A spawn that was called off ends by itself soon; tearing down beside it could miss what it makes last.
        """
        if self._machine.tearing_down or self.state.phase not in ("draining", "failed"):
            return
        flight = self._machine.flight
        if flight is not None and not beside_spawn:
            flight.abort.set()
            self._set_timer("spawn-hangs", ABORT_GRACE_S)
            return
        self.world.timers.cancel(self._key("spawn-hangs"))
        try:
            self._machine.tear_down(self.state, self.state.handle or self._late_handle)
        except Refused:
            self._set_timer("teardown", ASK_AGAIN_S)

    def _inspect(self) -> None:
        try:
            self._machine.inspect(self.state)
        except Refused:
            self._set_timer("inspect", ASK_AGAIN_S)

    # Time.

    def _anchor(self, now: datetime) -> None:
        """Remember a wall clock reading and its monotonic twin: a stepped wall clock must not end a life."""
        self._anchor_at, self._anchor_s = now, self.world.clock.monotonic_s()

    def _now(self) -> datetime:
        return self._anchor_at + timedelta(seconds=self.world.clock.monotonic_s() - self._anchor_s)

    def _arm_deadline(self, at_least_s: float = 0.01) -> None:
        due = deadline(self.state)
        if due is not None and self.state.phase in ("starting", "spawned"):
            self._set_timer("deadline", max((due - self._now()).total_seconds() + 0.01, at_least_s))

    def _listen(self) -> None:
        """Expect the registered agent's beats from now on."""
        if self.state.phase == "registered" and self.state.session is not None:
            self.world.router.sessions[self.state.id] = self.state.session
            self._set_timer("silence", self._silence.begin(acked=self.state.config_acked))

    def _look_for_silence(self) -> None:
        if self.state.phase != "registered":
            return
        silent_s, grace_s, again_in_s = self._silence.look(acked=self.state.config_acked)
        if silent_s is not None:
            self._tell_self(NoteSilence(silent_s=silent_s, grace_s=grace_s))
        self._set_timer("silence", again_in_s)

    # Small things.

    @property
    def rules(self) -> ScalerRules:
        """The rules of its scaler."""
        return self.world.rules[self.state.slot]

    def _key(self, what: str) -> str:
        return f"{self.state.id}:{what}"

    def _set_timer(self, what: str, delay_s: float) -> None:
        router, vm = self.world.router, self.state.id
        self.world.timers.set(self._key(what), delay_s, lambda: router.tell_vm(vm, Due(what)))

    def _tell_self(self, command: Any) -> None:
        cause = f"{subjects.vm(self.state.id)}:{self.state.version}"
        self.actor_ref.tell(Call(command, cause=cause))

    def _answer_early(self) -> None:
        """Decide the registration that waited for `vm.spawned`."""
        if self._early is not None:
            early, self._early = self._early, None
            self.actor_ref.tell(early)

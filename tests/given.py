"""Given facts, when a command, then facts or a refusal: how decisions are tested."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest

from actors.decisions import vm as vm_decisions
from actors.decisions.vm import VmCommand
from actors.errors import Refused
from events.codec import AnyEvent
from events.envelope import Recorded
from events.vm import (
    Draining,
    Failed,
    Handle,
    Reaped,
    Registered,
    Requested,
    Spawned,
    SpawnStarted,
    VmEvent,
)
from projections.vm import Phase, VmState, evolve

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
VM = "a-0001"
SESSION = "session-1"
HANDLE = Handle(driver="bare-metal", version=1, data={"pid": 42})
SLOT = "backend.alpha.small"

REQUESTED = Requested(
    scaler="small",
    backend="bare-metal",
    slot=SLOT,
    owner="alpha",
    host="alpha-host",
    boot_id="boot-1",
    labels=("linux", "small"),
    spawn_timeout_s=60,
    register_timeout_s=120,
)

HISTORIES: dict[Phase, tuple[VmEvent, ...]] = {
    "requested": (REQUESTED,),
    "starting": (REQUESTED, SpawnStarted()),
    "spawned": (REQUESTED, SpawnStarted(), Spawned(handle=HANDLE)),
    "registered": (REQUESTED, SpawnStarted(), Spawned(handle=HANDLE), Registered(session=SESSION)),
    "draining": (
        REQUESTED,
        SpawnStarted(),
        Spawned(handle=HANDLE),
        Registered(session=SESSION),
        Draining(reason="job-complete", exit_code=0),
    ),
    "failed": (
        REQUESTED,
        SpawnStarted(),
        Spawned(handle=HANDLE),
        Failed(reason="exited-early", detail="ended with exit code 1", exit_code=1),
    ),
    "reaped": (
        REQUESTED,
        SpawnStarted(),
        Spawned(handle=HANDLE),
        Registered(session=SESSION),
        Draining(reason="job-complete", exit_code=0),
        Reaped(reason="job-complete", slot=SLOT, evidence="nothing left"),
    ),
}
"""A usual way into every phase."""

PHASES: tuple[Phase, ...] = get_args(Phase)


def recorded(event: AnyEvent, version: int, *, aggregate: str = f"vm.{VM}", sequence: int = 0) -> Recorded:
    """Return the event as a fact; each version is one second after the one before."""
    return Recorded(
        sequence=sequence or version * 10,
        aggregate=aggregate,
        version=version,
        at=AT + timedelta(seconds=version),
        writer="alpha",
        epoch=0,
        cause="test",
        correlation="test",
        attempt="test",
        event=event,
    )


def life(events: Sequence[VmEvent]) -> VmState:
    """Return the machine these facts add up to."""
    state: VmState | None = None
    for version, event in enumerate(events, 1):
        state = evolve(state, event, recorded(event, version))
    assert state is not None
    return state


class Given:
    """A machine with a history."""

    def __init__(self, *events: VmEvent) -> None:
        self.state = life(events)

    def when(self, command: VmCommand) -> "When":
        """Decide; the outcome is looked at by `then` or `then_refused`."""
        return When(lambda: vm_decisions.decide(self.state, command))


class When:
    """A decision about to be made."""

    def __init__(self, decide: Callable[[], Sequence[Any]]) -> None:
        self._decide = decide

    def then(self, *events: object) -> None:
        """Exactly these facts come of it."""
        assert tuple(self._decide()) == events

    def then_nothing(self) -> None:
        """It came too late to matter, and nothing is written."""
        self.then()

    def then_refused(self, code: str, *, saying: str) -> None:
        """The asker is told why, in words."""
        with pytest.raises(Refused, match=saying) as refusal:
            self._decide()
        assert refusal.value.code == code


def given(phase: Phase) -> Given:
    """Return a machine that came to this phase in the usual way."""
    return Given(*HISTORIES[phase])

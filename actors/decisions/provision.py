"""What becomes of a cloud machine when a provisioner speaks of it. Pure."""

from typing import assert_never

from actors.commands import ReportProvision
from actors.decisions.scale import HANDLE
from actors.errors import Refused
from events.vm import Failed, Handle, Reaped, Reason, Spawned, TeardownConfirmed, VmEvent
from projections.vm import VmState

DETAIL_CHARACTERS = 400
"""How much of a provisioner's words a fact keeps."""


def note_provision(state: VmState, said: ReportProvision) -> tuple[VmEvent, ...]:
    """Return what a provisioner's answer leads to; nothing where it repeats itself or comes too late to matter.

    Raises:
        Refused: `not-yours`, where the machine was never offered to this target.
    """
    if said.target not in state.targets:
        raise Refused(
            "not-yours",
            f"agent {state.id} was not offered to {said.target}: only its own targets answer for it",
        )
    match said.verdict:
        case "accepted":
            if state.phase != "starting":
                return ()
            data = {"target": said.target, "reference": said.reference}
            return (Spawned(handle=Handle(driver=HANDLE, version=1, data=data)),)
        case "failed":
            return _failed(state, said)
        case "terminated":
            return _terminated(state, said)
    assert_never(said.verdict)


def _failed(state: VmState, said: ReportProvision) -> tuple[VmEvent, ...]:
    """Fail the machine if nobody else can still bring it up; a registered one is there, whatever is said of it."""
    if state.phase == "spawned":
        assert state.handle is not None, "what was accepted has a handle"
        concerned = state.handle.data.get("target") == said.target
    else:
        concerned = state.phase == "starting" and len(state.targets) == 1
    if not concerned:
        return ()
    reason: Reason = "launch-refused" if said.permanent else "launch-failed"
    return (Failed(reason=reason, detail=_words(said, "could not start it")),)


def _terminated(state: VmState, said: ReportProvision) -> tuple[VmEvent, ...]:
    """Note that one target has nothing left; when all of them have nothing, the machine is reaped.

    A machine that is gone before its life was over was taken away by its provider, which knows best.
    """
    if state.phase == "reaped" or said.target in state.confirmed or state.phase == "requested":
        return ()
    events: list[VmEvent] = []
    reason = state.reason
    if not state.ended:
        if _somebody_elses(state, said):
            return ()
        reason = "exited" if state.phase == "registered" else "exited-early"
        events.append(Failed(reason=reason, detail=_words(said, "its provisioner ended it")))
    evidence = _words(said, "nothing is left of it")
    if len(state.targets) > 1:
        events.append(TeardownConfirmed(target=said.target, evidence=evidence))
    if {*state.confirmed, said.target} >= {*state.targets}:
        events.append(Reaped(reason=reason or "operator", slot=state.slot, evidence=evidence))
    return tuple(events)


def _somebody_elses(state: VmState, said: ReportProvision) -> bool:
    """Tell whether a target speaks of its own copy of a machine that another one may have brought up."""
    return len(state.targets) > 1 and (state.handle is None or state.handle.data.get("target") != said.target)


def _words(said: ReportProvision, otherwise: str) -> str:
    return f"{said.target}: {said.detail[:DETAIL_CHARACTERS] or otherwise}"

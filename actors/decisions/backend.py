"""What becomes of a scaler's gate. Pure."""

from actors.commands import SetGate
from events.backend import BackendEvent, DrainStarted, Paused, Resumed
from projections.backend import BackendState


def decide(state: BackendState, command: SetGate) -> tuple[BackendEvent, ...]:
    """Return the gate's fact; none when it stands so already."""
    if state.gate == command.gate:
        return ()
    match command.gate:
        case "paused":
            return (Paused(by=command.by),)
        case "draining":
            return (DrainStarted(by=command.by),)
        case "open":
            return (Resumed(by=command.by),)

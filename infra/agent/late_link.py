"""The actors' way to agents, from before there is a door."""

from infra.agent.door import AgentDoor


class LateLink:
    """The actors' way to agents; the door opens after the actors."""

    def __init__(self) -> None:
        self.door: AgentDoor | None = None

    def stop(self, vm: str, reason: str, grace_s: float) -> None:
        """Tell the agent to stop, when there is a way to."""
        if self.door is not None:
            self.door.stop(vm, reason, grace_s)

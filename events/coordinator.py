"""What has happened to one coordinator: started, configured, stopped, and the slots under its global cap."""

from typing import Any

from events.envelope import Event


class Started(Event, frozen=True, kw_only=True, tag="coordinator.started"):
    """A process took this coordinator id. Any older process with it loses its next append, and stops."""

    host: str
    boot_id: str
    pid: int
    version: str


class ConfigApplied(Event, frozen=True, kw_only=True, tag="coordinator.config_applied"):
    """These are the rules from here on; `digest` is the sha256 of the canonical form of all of them."""

    digest: str
    global_max_agents: int
    scalers: dict[str, Any]  # name -> what decisions used: backend, max_agents, label sets


class GlobalSlotTaken(Event, frozen=True, kw_only=True, tag="coordinator.slot_taken"):
    """One agent under `global_max_agents`, in the same batch as `vm.requested`; freed by `vm.reaped`."""

    vm: str


class Stopped(Event, frozen=True, kw_only=True, tag="coordinator.stopped"):
    """The process ended by itself; its machines run on and will be taken up again."""

    reason: str


CoordinatorEvent = Started | ConfigApplied | GlobalSlotTaken | Stopped

"""What has happened to one scaler: slots taken, pause, drain."""

from events.envelope import Event, Resources


class SlotTaken(Event, frozen=True, kw_only=True, tag="backend.slot_taken"):
    """One agent's share of the scaler's caps, taken in the same batch as `vm.requested`; freed by `vm.reaped`."""

    vm: str
    requests: Resources = Resources()


class Paused(Event, frozen=True, kw_only=True, tag="backend.paused"):
    """No new agents; running ones go on."""

    by: str


class DrainStarted(Event, frozen=True, kw_only=True, tag="backend.drain_started"):
    """No new agents, and idle or unregistered ones are ended; busy ones finish."""

    by: str


class Resumed(Event, frozen=True, kw_only=True, tag="backend.resumed"):
    """Pause or drain is over."""

    by: str


BackendEvent = SlotTaken | Paused | DrainStarted | Resumed

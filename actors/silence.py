"""When a registered agent has fallen silent: measured by our own steady clock, and looked at twice."""

from typing import NamedTuple

from actors.decisions.capacity import ScalerRules
from actors.world import World

LET_IN_S = 15.0
"""The least grace of an agent that has not acknowledged its configuration.

It beats once it knows that it is in. If the answer to its registration was lost with us, it asks again after 5 s.
"""


class Looked(NamedTuple):
    """What a look found: for how long the agent has been silent beyond the grace, or None; and when to look again."""

    silent_s: float | None
    grace_s: float
    again_in_s: float


class Silence:
    """Watches for the beats of one agent. Time in which we could not hear anybody does not count."""

    def __init__(self, world: World, rules: ScalerRules, vm: str) -> None:
        self._world = world
        self._rules = rules
        self._vm = vm
        self._suspect = False

    def begin(self, *, acked: bool) -> float:
        """Expect beats from now on; return when to look for the first time."""
        self._world.router.heard_s[self._vm] = self._world.clock.monotonic_s()
        self._suspect = False
        return self._grace_s(acked=acked)

    def look(self, *, acked: bool) -> Looked:
        """Look whether it has beaten; silence counts at the second look: beats may be queued behind a stall of ours.

        Absence starts at the later of its last beat and our own connection.
        """
        grace_s, now_s = self._grace_s(acked=acked), self._world.clock.monotonic_s()
        heard_s = self._world.router.heard_s.get(self._vm, now_s)
        silent_s = now_s - max(heard_s, self._world.link_up_since_s())
        if silent_s <= grace_s:
            self._suspect = False
            return Looked(None, grace_s, max(min(grace_s, grace_s - silent_s), 0.05))
        if not self._suspect:
            self._suspect = True
            return Looked(None, grace_s, min(2 * self._rules.beat_every_s, grace_s))
        return Looked(silent_s, grace_s, grace_s)

    def _grace_s(self, *, acked: bool) -> float:
        grace_s = self._rules.heartbeat_grace_s
        return grace_s if acked else max(grace_s, LET_IN_S)

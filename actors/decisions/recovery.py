"""After a restart: what the log says of a machine, times what the host says, is what we do. A table, cell by cell."""

from typing import Literal

from actors.decisions.scale import BACKEND
from actors.driver import Found, Presence
from projections.vm import Phase, VmState

Action = Literal[
    "wait-turn",  # it never touched the host: back into the throttle
    "spawn",  # its turn had come and nothing was made: bring it up now
    "take-up",  # it runs and is ours: watch it again
    "fail-gone",  # it should run and does not: record it, then tear down what is left
    "fail-half-made",  # the crash came in the middle of its start: tear down
    "tear-down",  # its life was over: finish the teardown
    "ask-again",  # the host could not say: spare it, and ask again soon
    "listen",  # only its agent can tell: wait for it as before
    "nothing",  # all is as it should be
    "report",  # something is there that the log does not account for: for the operator, never killed
]

TABLE: dict[tuple[Phase | None, Presence], Action] = {
    ("requested", "absent"): "wait-turn",
    ("requested", "half-made"): "fail-half-made",
    ("requested", "running"): "fail-half-made",
    ("requested", "foreign"): "fail-half-made",
    ("requested", "unknown"): "ask-again",
    ("starting", "absent"): "spawn",
    ("starting", "half-made"): "fail-half-made",
    ("starting", "running"): "take-up",
    ("starting", "foreign"): "fail-half-made",
    ("starting", "unknown"): "ask-again",
    ("spawned", "absent"): "fail-gone",
    ("spawned", "half-made"): "fail-gone",
    ("spawned", "running"): "take-up",
    ("spawned", "foreign"): "fail-gone",
    ("spawned", "unknown"): "ask-again",
    ("registered", "absent"): "fail-gone",
    ("registered", "half-made"): "fail-gone",
    ("registered", "running"): "take-up",
    ("registered", "foreign"): "fail-gone",
    ("registered", "unknown"): "ask-again",
    ("draining", "absent"): "tear-down",
    ("draining", "half-made"): "tear-down",
    ("draining", "running"): "tear-down",
    ("draining", "foreign"): "tear-down",
    ("draining", "unknown"): "tear-down",
    ("failed", "absent"): "tear-down",
    ("failed", "half-made"): "tear-down",
    ("failed", "running"): "tear-down",
    ("failed", "foreign"): "tear-down",
    ("failed", "unknown"): "tear-down",
    ("reaped", "absent"): "nothing",
    ("reaped", "half-made"): "report",
    ("reaped", "running"): "report",
    ("reaped", "foreign"): "nothing",
    ("reaped", "unknown"): "nothing",
    (None, "absent"): "nothing",
    (None, "half-made"): "report",
    (None, "running"): "report",
    (None, "foreign"): "report",
    (None, "unknown"): "report",
}
"""Teardown asks the host once more by itself and refuses in doubt; so an ended life may always begin it."""


CLOUD_TABLE: dict[Phase, Action] = {
    "requested": "wait-turn",
    "starting": "nothing",
    "spawned": "nothing",
    "registered": "listen",
    "draining": "tear-down",
    "failed": "tear-down",
    "reaped": "nothing",
}
"""A machine of an event scaler: no host can be asked, and what its provisioners were told is in the log already."""


def action(state: VmState, found: Found, boot_id: str) -> Action:
    """Return what to do with a machine after a restart, on a host whose present boot is `boot_id`.

    A machine of an earlier boot cannot run: it is gone whatever stands in its place, which is then not touched.
    """
    if state.backend == BACKEND:
        return CLOUD_TABLE[state.phase]
    if state.boot_id != boot_id and not state.ended and state.phase != "requested":
        return "fail-gone"
    return TABLE[(state.phase, found.presence)]

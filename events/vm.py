"""What has happened to one agent's machine, whatever it runs on: a microVM, a container, a process group, a cloud machine."""

from typing import Any, Literal

import msgspec

from events.envelope import Event, Resources

Reason = Literal[
    "job-complete",  # the agent said done, or left by itself with its work finished
    "spawn-timeout",  # the driver did not answer within the spawn deadline
    "register-timeout",  # the machine ran, but no agent registered in time
    "heartbeat-timeout",  # the agent fell silent for longer than the grace
    "launch-refused",  # deterministic: the host will refuse it again (missing binary, bad limits)
    "launch-failed",  # the driver failed for a reason that may pass
    "exited-early",  # the machine ended before its agent registered
    "exited",  # the machine ended under a registered agent that had not said done
    "operator",  # somebody asked for it by name
    "drain",  # the scaler or coordinator is being emptied
    "shutdown",  # the coordinator ends and was told to take its machines with it
    "host-rebooted",  # the host's boot id changed: nothing of the machine is left
    "supervision",  # its actor died too often; the reason is in the detail
]
"""Why a life ended; bounded, so that it can label metrics."""


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver needs to find its machine again; opaque to everybody else.

    `version` is the driver's own: a newer driver must still read the handles of running machines.
    """

    driver: str
    version: int
    data: dict[str, Any]


class Requested(Event, frozen=True, kw_only=True, tag="vm.requested"):
    """A machine is wanted, and a slot for it was taken in the same batch.

    Holds all that teardown will need, written before the first command touches the host: `placement` is
    the driver's plan (paths, cgroup, chroot, address), `boot_id` tells whether any of it can still exist.
    """

    scaler: str
    backend: str
    slot: str  # the backend aggregate whose slot it holds until reaped
    owner: str  # the coordinator that has the duty
    host: str
    boot_id: str
    labels: tuple[str, ...]  # the declared label set, by which the driver knows what to start
    agent_labels: tuple[str, ...] = ()  # what the agent's jobs may ask for
    gate: tuple[str, ...] = ()  # what a job must ask for before this agent may take it
    demand: str | None = None
    job: str | None = None
    run: str | None = None
    requests: Resources = Resources()
    limits: Resources = Resources()
    targets: tuple[str, ...] = ()
    network: str = ""  # the allocator aggregate its address is leased from; empty: it has none of ours
    address: str = ""
    placement: dict[str, Any] = {}
    spawn_timeout_s: float = 300.0
    register_timeout_s: float = 300.0


class SpawnStarted(Event, frozen=True, kw_only=True, tag="vm.spawn_started"):
    """Its turn in the throttle came: from here on the host may hold traces of it, and the spawn deadline runs."""


class Spawned(Event, frozen=True, kw_only=True, tag="vm.spawned"):
    """The machine runs; the agent has yet to register."""

    handle: Handle


class Registered(Event, frozen=True, kw_only=True, tag="vm.registered"):
    """Its agent came, proved to be this machine's, and is the only one that ever will be.

    `session` is the random id the agent made at its start: the same session may register again after a lost
    reply, another one is refused.
    """

    session: str
    agent_version: str = ""
    facts: dict[str, str] = {}  # self-reported: os, arch, host name, runtimes


class ConfigAcked(Event, frozen=True, kw_only=True, tag="vm.config_acked"):
    """The agent has its configuration; what was left in the metadata service for it may be cleared."""


class Draining(Event, frozen=True, kw_only=True, tag="vm.draining"):
    """It takes no more work; teardown follows. The normal end of a life."""

    reason: Reason
    detail: str = ""
    exit_code: int | None = None  # None: nobody could collect it


class Failed(Event, frozen=True, kw_only=True, tag="vm.failed"):
    """It will not do its job. A teardown is still owed."""

    reason: Reason
    detail: str
    exit_code: int | None = None


class TeardownFailed(Event, frozen=True, kw_only=True, tag="vm.teardown_failed"):
    """The host would not let go. Kept and tried again, never forgotten."""

    detail: str
    tries: int
    retry_in_s: float


class TeardownConfirmed(Event, frozen=True, kw_only=True, tag="vm.teardown_confirmed"):
    """One of its provisioners says that nothing of it is left; `vm.reaped` follows when all of them have."""

    target: str
    evidence: str


class Reaped(Event, frozen=True, kw_only=True, tag="vm.reaped"):
    """Confirmed by the host or the provider: nothing is left, nothing is owed. Frees the slot."""

    reason: Reason
    slot: str
    evidence: str  # what was looked at to know that nothing is left


class TakenUp(Event, frozen=True, kw_only=True, tag="vm.taken_up"):
    """A restarted coordinator found the machine on its host, proved it to be ours, and watches it again."""

    coordinator: str
    evidence: str


class Adopted(Event, frozen=True, kw_only=True, tag="vm.adopted"):
    """Another coordinator took over the duty."""

    owner: str


class Condemned(Event, frozen=True, kw_only=True, tag="vm.condemned"):
    """The reaper's or an operator's verdict: to be torn down by whoever has the duty."""

    reason: Reason
    evidence: str


class Spared(Event, frozen=True, kw_only=True, tag="vm.spared"):
    """It looked lost, and was left alone; the evidence says why."""

    evidence: str


VmEvent = (
    Requested
    | SpawnStarted
    | Spawned
    | Registered
    | ConfigAcked
    | Draining
    | Failed
    | TeardownFailed
    | TeardownConfirmed
    | Reaped
    | TakenUp
    | Adopted
    | Condemned
    | Spared
)

"""Every stream and subject name, one function each; nowhere else is a subject spelled."""

import re

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Coordinator ids, hosts, scalers, pools, networks, clusters and targets: one subject token each."""

VM_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""A VM's id, which is its agent's: the jailer's rule, and one subject token."""


TAG_HEADER = "Fleetlog-Tag"
"""The header of each stored fact that repeats its tag, for consumers that filter without decoding."""


def checked(name: str, what: str) -> str:
    """Return `name` if it can be one subject token; raise ValueError naming the place and the form."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: use 1 to 63 lowercase letters, digits and dashes, not starting with a dash"
        )
    return name


def vm(vm_id: str) -> str:
    """Return the aggregate of one agent's machine."""
    assert VM_ID.fullmatch(vm_id), f"not a VM id: {vm_id!r}"
    return f"vm.{vm_id}"


def local_backend(coordinator: str, scaler: str) -> str:
    """Return the aggregate of a scaler whose machines run on its coordinator's host."""
    return f"backend.{coordinator}.{scaler}"


def event_backend(scaler: str) -> str:
    """Return the aggregate of an event scaler, shared by the whole cluster."""
    return f"backend.{scaler}"


def allocator(host: str, network: str) -> str:
    """Return the aggregate of one network's addresses on one host."""
    return f"allocator.{host}.{network}"


def coordinator(coordinator_id: str) -> str:
    """Return the aggregate of one coordinator."""
    return f"coordinator.{coordinator_id}"


def leader() -> str:
    """Return the aggregate of the elections; the sequence of its last fact is the epoch."""
    return "coordinator.leader"


def demand(key: str) -> str:
    """Return the aggregate of one demand, by the hash of its job id or by its own id."""
    return f"demand.{key}"


def claim(digest: str) -> str:
    """Return the aggregate of one claim, by the sha256 of its code in hex."""
    return f"claim.{digest}"


def scale_up(target: str, scaler: str, vm_id: str) -> str:
    """Return the aggregate of the wish to start one machine, as one target is told it."""
    return f"scale.up.{target}.{scaler}.{vm_id}"


def scale_down(target: str, scaler: str, vm_id: str) -> str:
    """Return the aggregate of the wish to end one machine, as one target is told it."""
    return f"scale.down.{target}.{scaler}.{vm_id}"


def scale_of(cluster: str, target: str) -> str:
    """Return the wildcard by which a target's provisioner hears of its machines, ups and downs in their order."""
    return f"{log_prefix(cluster)}scale.*.{checked(target, 'target')}.>"


def stream(cluster: str) -> str:
    """Return the stream that holds every fact of a cluster and nothing else."""
    return f"FLEETLOG_{checked(cluster, 'cluster').upper().replace('-', '_')}"


def log_prefix(cluster: str) -> str:
    """Return what stands before the aggregate in a fact's subject."""
    return f"fleetlog.{cluster}.log."


def log(cluster: str, aggregate: str) -> str:
    """Return the subject of one aggregate's facts."""
    return log_prefix(cluster) + aggregate


def whole_log(cluster: str) -> str:
    """Return the wildcard that is the stream's only subject."""
    return log_prefix(cluster) + ">"


def matches(pattern: str, aggregate: str) -> bool:
    """Tell whether an aggregate falls under a wildcard: `*` is one token, a last `>` one or more."""
    wanted, tokens = pattern.split("."), aggregate.split(".")
    if wanted[-1] == ">":
        if len(tokens) < len(wanted):
            return False
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )


def agent(cluster: str, vm_id: str, verb: str) -> str:
    """Return what an agent publishes on: register, acked, beat, logs, done."""
    return f"fleetlog.{cluster}.agent.{vm_id}.{verb}"


def agent_everything(cluster: str, vm_id: str) -> str:
    """Return all that an agent may publish on, and nothing else."""
    return f"fleetlog.{cluster}.agent.{vm_id}.>"


def agent_command(cluster: str, vm_id: str) -> str:
    """Return what an agent listens on: config, stop, renew."""
    return f"fleetlog.{cluster}.command.{vm_id}"


def agent_inbox(vm_id: str) -> str:
    """Return the prefix of the only inbox an agent may listen on."""
    return f"_INBOX_agent_{vm_id}"


def all_agents(cluster: str, verb: str) -> str:
    """Return the wildcard on which a coordinator hears one verb from every agent."""
    return f"fleetlog.{cluster}.agent.*.{verb}"


def api(cluster: str, verb: str) -> str:
    """Return the subject of a request any coordinator may answer, such as demand."""
    return f"fleetlog.{cluster}.api.{verb}"


def api_of(cluster: str, coordinator_id: str, verb: str) -> str:
    """Return the subject of a request to one coordinator."""
    return f"fleetlog.{cluster}.api.{coordinator_id}.{verb}"


def provision(cluster: str, target: str) -> str:
    """Return what a target's provisioner answers on, for any of its machines."""
    return f"fleetlog.{cluster}.provision.{target}"


def all_provisions(cluster: str) -> str:
    """Return the wildcard on which a coordinator hears every target's provisioner."""
    return f"fleetlog.{cluster}.provision.*"


def provisioner_consumer(target: str) -> str:
    """Return the durable consumer of a target's provisioner: one, however many processes share it."""
    return f"provisioner-{target}"


def provisioner_inbox(target: str) -> str:
    """Return the prefix of the only inbox a target's provisioner may listen on."""
    return f"_INBOX_provisioner_{target}"


def redeem(cluster: str) -> str:
    """Return where a machine exchanges its claim code: all that the bootstrap identity may publish on."""
    return api(cluster, "redeem")


BOOTSTRAP_INBOX = "_INBOX_bootstrap"
"""The prefix of the inboxes of machines that redeem. They share it, so nothing secret is ever answered there."""


def presence(cluster: str, coordinator_id: str) -> str:
    """Return what a coordinator beats on."""
    return f"fleetlog.{cluster}.presence.{coordinator_id}"

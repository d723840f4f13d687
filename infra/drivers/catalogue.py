"""Which driver serves which scaler; a new backend is one branch here and one line in the configuration's table."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from actors.driver import Driver
from infra.config.bare_metal import BareMetalScaler
from infra.config.event import EventScaler
from infra.config.firecracker import FirecrackerLabelSet, FirecrackerScaler
from infra.config.scaler import NetworkPolicy, ScalerConfig
from infra.config.scripted import ScriptedScaler
from infra.drivers.bare_metal.config import BareMetalConfig, LabelSet
from infra.drivers.bare_metal.driver import BareMetalDriver
from infra.drivers.event import EventDriver
from infra.drivers.firecracker import preflight
from infra.drivers.firecracker.config import SPAWN_WIDTH, FirecrackerConfig
from infra.drivers.firecracker.config import LabelSet as MicrovmLabelSet
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.gate import Gate
from infra.drivers.firecracker.host_net import HostNet
from infra.drivers.scripted import ScriptedDriver
from infra.network.policy import Policy

logger = logging.getLogger("fleetlog.drivers")

AgentLines = Callable[[str, str], None]
"""Takes (vm, line) of what agents write. Called from one thread per driver; must be quick."""

FORWARDED_PREFIX = "FLEETLOG_AGENT_ENV_"
"""`FLEETLOG_AGENT_ENV_NAME` in the coordinator's environment is `NAME` in every agent's."""

_GATE = Gate(SPAWN_WIDTH)
"""One for the process: the width is the host's, however many scalers there are."""


def build_driver(
    scaler: ScalerConfig,
    *,
    owner: str,
    state: Path,
    environment: Mapping[str, str],
    lines: AgentLines | None,
    reach: Callable[[str], None],
    net: HostNet | None = None,
    host_access: tuple[str, ...] = (),
) -> Driver:
    """Return the driver of a scaler; all it keeps is below `state`, which scalers of one backend share.

    `net` is the host's network, for microVMs; `host_access` is what a machine reaches of its host where its label set
    does not say: see `infra.network.policy.default_host_access`.
    """
    match scaler:
        case BareMetalScaler():
            return BareMetalDriver(
                bare_metal_config(scaler, owner=owner, state=state, environment=environment),
                sink=lines,
                ambient=environment,
                reach=reach,
            )
        case FirecrackerScaler():
            assert net is not None, "microVMs need the host's network"
            config = firecracker_config(
                scaler, owner=owner, state=state, environment=environment, host_access=host_access
            )
            for lacking in preflight.missing(config):
                logger.error("scaler %s cannot start microVMs: %s", scaler.name, lacking)
            driver = FirecrackerDriver(config, net, gate=_GATE, lines=lines, reach=reach)
            driver.prewarm()
            return driver
        case EventScaler():
            return EventDriver()
        case ScriptedScaler():
            return ScriptedDriver(owner=owner, backend="scripted", reach=reach)
        case _:
            raise AssertionError(f"scaler {scaler.name} has backend {scaler.backend}, which no driver serves")


def policy_of(scaler: FirecrackerScaler, labels: tuple[str, ...], host_access: tuple[str, ...]) -> Policy:
    """Return what a machine of this label set may reach, given what it reaches of its host by default."""
    label_set = scaler.label_set(labels)
    assert isinstance(label_set, FirecrackerLabelSet)
    return _policy(label_set.network_policy or NetworkPolicy(), host_access)


def firecracker_config(
    scaler: FirecrackerScaler,
    *,
    owner: str,
    state: Path,
    environment: Mapping[str, str],
    host_access: tuple[str, ...],
) -> FirecrackerConfig:
    """Return the driver's settings from the scaler's."""
    return FirecrackerConfig(
        owner=owner,
        state_dir=str(state / "microvms"),
        firecracker_path=scaler.firecracker_path,
        jailer_path=scaler.jailer_path,
        kernel_path=scaler.kernel_path,
        uid=scaler.uid,
        gid=scaler.gid,
        chroot_base=scaler.chroot_base,
        vcpus=scaler.vcpus,
        mem_mib=scaler.mem_mib,
        use_sudo=scaler.use_sudo,
        use_cgroups=scaler.use_cgroups,
        boot_args=scaler.boot_args,
        extra_hosts=scaler.extra_hosts,
        forwarded=_forwarded(environment),
        stop_grace_s=scaler.stop_grace_s,
        label_sets=tuple(
            MicrovmLabelSet(
                labels=each.labels,
                rootfs_path=each.rootfs_path,
                kernel_path=each.kernel_path,
                vcpus=each.vcpus,
                mem_mib=each.mem_mib,
                overlay_mib=each.overlay_mib,
                env=dict(each.env),
                policy=_policy(each.network_policy or NetworkPolicy(), host_access),
            )
            for each in scaler.label_sets
        ),
    )


def _policy(wanted: NetworkPolicy, host_access: tuple[str, ...]) -> Policy:
    return Policy(
        allowlist=wanted.allowlist,
        deny_all=wanted.deny_all,
        host_access=host_access if wanted.host_access is None else wanted.host_access,
    )


def _forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(FORWARDED_PREFIX): value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIX) and len(name) > len(FORWARDED_PREFIX)
    }


def bare_metal_config(
    scaler: BareMetalScaler, *, owner: str, state: Path, environment: Mapping[str, str]
) -> BareMetalConfig:
    """Return the driver's settings from the scaler's."""
    return BareMetalConfig(
        owner=owner,
        state_dir=str(state),
        label_sets=tuple(
            LabelSet(
                labels=each.labels,
                binary_path=each.binary_path,
                args=each.args,
                env=dict(each.env),
                network_policy=each.network_policy is not None,
                working_dir=each.working_directory,
            )
            for each in scaler.label_sets
        ),
        forwarded=_forwarded(environment),
        enforce_limits=scaler.enforce_cgroups,
        stop_grace_s=scaler.stop_grace_s,
    )

"""Which driver serves which scaler; a new backend is one branch here and one line in the configuration's table."""

from collections.abc import Callable, Mapping
from pathlib import Path

from actors.driver import Driver
from infra.config.bare_metal import BareMetalScaler
from infra.config.scaler import ScalerConfig
from infra.config.scripted import ScriptedScaler
from infra.drivers.bare_metal.config import BareMetalConfig, LabelSet
from infra.drivers.bare_metal.driver import BareMetalDriver
from infra.drivers.scripted import ScriptedDriver

AgentLines = Callable[[str, str], None]
"""Takes (vm, line) of what agents write. Called from one thread per driver; must be quick."""

FORWARDED_PREFIX = "FLEETLOG_AGENT_ENV_"
"""`FLEETLOG_AGENT_ENV_NAME` in the coordinator's environment is `NAME` in every agent's."""


def build_driver(
    scaler: ScalerConfig,
    *,
    owner: str,
    state: Path,
    environment: Mapping[str, str],
    lines: AgentLines | None,
    reach: Callable[[str], None],
) -> Driver:
    """Return the driver of a scaler; all it keeps is below `state`, which scalers of one backend share."""
    match scaler:
        case BareMetalScaler():
            return BareMetalDriver(
                bare_metal_config(scaler, owner=owner, state=state, environment=environment),
                sink=lines,
                ambient=environment,
                reach=reach,
            )
        case ScriptedScaler():
            return ScriptedDriver(owner=owner, backend="scripted", reach=reach)
        case _:
            raise AssertionError(f"scaler {scaler.name} has backend {scaler.backend}, which no driver serves")


def bare_metal_config(
    scaler: BareMetalScaler, *, owner: str, state: Path, environment: Mapping[str, str]
) -> BareMetalConfig:
    """Return the driver's settings from the scaler's."""
    forwarded = {
        name.removeprefix(FORWARDED_PREFIX): value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIX) and len(name) > len(FORWARDED_PREFIX)
    }
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
        forwarded=forwarded,
        enforce_limits=scaler.enforce_cgroups,
        stop_grace_s=scaler.stop_grace_s,
    )

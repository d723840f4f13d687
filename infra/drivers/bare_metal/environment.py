"""What an agent's environment is: an allow-list of ours, what is forwarded, its credential, and its label set's last."""

from __future__ import annotations

import re
from collections.abc import Mapping

from infra.drivers.bare_metal.config import BareMetalConfig, LabelSet

COOKIE = "FLEETLOG_RUN"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = "FLEETLOG_"


def build(
    config: BareMetalConfig,
    label_set: LabelSet,
    ambient: Mapping[str, str],
    agent: Mapping[str, str],
    cookie: str,
) -> dict[str, str]:
    """Return the whole environment, later sources winning.

    Never the whole of ours unless trusted, and even then nothing that starts with `FLEETLOG_`: that is where our
    own secrets are. Names that no shell could hold are left out.
    """
    if config.trusted_environment:
        system = {name: value for name, value in ambient.items() if not name.startswith(_OURS)}
    else:
        system = {name: ambient[name] for name in config.system_variables if name in ambient}
    merged = {**system, **config.forwarded, **agent, **label_set.env, COOKIE: cookie}
    return {name: value for name, value in merged.items() if _NAME.fullmatch(name) and "\0" not in value}

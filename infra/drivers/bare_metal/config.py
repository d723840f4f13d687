"""What the bare-metal driver is told: which programs to start, with what, and within which bounds."""

from typing import Literal

import msgspec

SYSTEM_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)


class LabelSet(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of agent: what it is called by and what is started for it."""

    labels: tuple[str, ...]
    binary_path: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    network_policy: bool = False  # one is configured; it cannot be enforced here, which is said at the start
    working_dir: str | None = None  # None: a directory of its own that goes away with it


class BareMetalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's settings. `owner` is the coordinator's id; all it makes bears it.

    `forwarded` are variables every agent gets (the ones configured as `FLEETLOG_AGENT_ENV_<NAME>`, by `<NAME>`).
    Of our own environment only `system_variables` go along, or with `trusted_environment` all but `FLEETLOG_*`.
    `cgroup` "none" does without a cgroup even where one could be made.
    """

    owner: str
    state_dir: str
    label_sets: tuple[LabelSet, ...]
    forwarded: dict[str, str] = {}
    system_variables: tuple[str, ...] = SYSTEM_VARIABLES
    trusted_environment: bool = False
    enforce_limits: bool = False
    stop_grace_s: float = 5.0
    kill_wait_s: float = 10.0
    start_timeout_s: float = 10.0
    live_log_bytes: int = 64 * 1024 * 1024  # on disk per running machine
    kept_log_bytes: int = 1024 * 1024  # per ended machine
    kept_logs: int = 200
    shell: str = "/bin/sh"
    cgroup: Literal["auto", "none"] = "auto"

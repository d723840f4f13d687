"""What the Firecracker driver is told: its binaries, images, jail and sizes, and what each label set changes."""

import msgspec

from infra.network.policy import Policy

VCPUS = 2
VCPUS_MOST = 32
"""Firecracker's own limit."""

MEM_MIB = 512
OVERLAY_MIB = 2048
SOCKET_WAIT_S = 30.0
SPAWN_WIDTH = 4


class LabelSet(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of microVM. What is None is the scaler's. `env` is secret: it goes through MMDS only."""

    labels: tuple[str, ...]
    rootfs_path: str
    kernel_path: str | None = None
    vcpus: int | None = None
    mem_mib: int | None = None
    overlay_mib: int = OVERLAY_MIB
    env: dict[str, str] = {}
    policy: Policy = Policy()

    def __repr__(self) -> str:
        # The environment is secret, and a representation ends up in log lines.
        return f"LabelSet(labels={self.labels!r}, rootfs_path={self.rootfs_path!r})"


class FirecrackerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's settings. `owner` is the coordinator's id; all it makes bears it.

    `forwarded` are variables every agent gets; `extra_hosts` are `name:address` or `name:host-gateway`. `netns` is the
    path of the network namespace the microVMs' TAPs are in, None for ours. `use_sudo`: chown, chmod and kill through
    `sudo -n`, for a coordinator that is not root. `use_cgroups` False: no limits through cgroups even where there are.
    """

    owner: str
    state_dir: str
    firecracker_path: str
    jailer_path: str
    kernel_path: str
    uid: int
    gid: int
    label_sets: tuple[LabelSet, ...]
    chroot_base: str = "/srv/jailer"
    vcpus: int = VCPUS
    mem_mib: int = MEM_MIB
    use_sudo: bool = False
    use_cgroups: bool = True
    extra_hosts: tuple[str, ...] = ()
    forwarded: dict[str, str] = {}
    netns: str | None = None
    boot_args: str = ""
    stop_grace_s: float = 5.0
    kill_wait_s: float = 5.0
    socket_wait_s: float = SOCKET_WAIT_S
    live_log_bytes: int = 64 * 1024 * 1024
    kept_log_bytes: int = 1024 * 1024
    kept_logs: int = 200

    def __repr__(self) -> str:
        return f"FirecrackerConfig(owner={self.owner!r}, chroot_base={self.chroot_base!r})"

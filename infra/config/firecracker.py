"""The keys of the `firecracker` backend: agents as jailed microVMs of the coordinator's own host."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from infra.config.extra_hosts import ENTRY_FORM, parse_entry
from infra.config.kinds import AbsolutePath, Environment
from infra.config.problems import Finding
from infra.config.scaler import LabelSet, NetworkPolicy, ScalerConfig
from infra.drivers.firecracker.config import MEM_MIB, OVERLAY_MIB, VCPUS, VCPUS_MOST
from infra.drivers.firecracker.paths import BINARY, SOCKET_PATH_BYTES_MOST, socket_length

_MIB_MOST = 16 * 1024 * 1024
_ID_MOST = 2**32 - 2


def _entry(text: str) -> str:
    parse_entry(text)
    return text


ExtraHost = Annotated[str, Meta(description=ENTRY_FORM, max_length=320, extra={"read": _entry})]
Vcpus = Annotated[int, Meta(ge=1, le=VCPUS_MOST)]
Mib = Annotated[int, Meta(ge=1, le=_MIB_MOST)]
JailedId = Annotated[
    int, Meta(ge=1, le=_ID_MOST, description="a number above 0: a jailed root would be none")
]
BootArgs = Annotated[
    str, Meta(pattern=r"^[\x20-\x7e]*$", max_length=1024, description="kernel parameters, printable ASCII")
]


class FirecrackerLabelSet(LabelSet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to start: the image of the root file system, and what differs from the scaler's."""

    rootfs_path: AbsolutePath
    kernel_path: AbsolutePath | None = None
    vcpus: Vcpus | None = None
    mem_mib: Mib | None = None
    overlay_mib: Mib = OVERLAY_MIB
    env: Environment = {}
    network_policy: NetworkPolicy | None = None

    def __repr__(self) -> str:
        # The environment is secret, and a representation ends up in log lines.
        return f"FirecrackerLabelSet(labels={self.labels!r}, rootfs_path={self.rootfs_path!r})"


class FirecrackerScaler(ScalerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jailed microVMs. `use_sudo`: for a coordinator that is not root; `use_cgroups`: hold declared limits by them."""

    backend: Literal["firecracker"]
    label_sets: Annotated[tuple[FirecrackerLabelSet, ...], Meta(min_length=1, max_length=64)]
    firecracker_path: AbsolutePath
    jailer_path: AbsolutePath
    kernel_path: AbsolutePath
    uid: JailedId
    gid: JailedId
    chroot_base: AbsolutePath = "/srv/jailer"
    vcpus: Vcpus = VCPUS
    mem_mib: Mib = MEM_MIB
    use_sudo: bool = False
    use_cgroups: bool = True
    boot_args: BootArgs = ""
    extra_hosts: Annotated[tuple[ExtraHost, ...], Meta(max_length=64)] = ()

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the scaler as a whole."""
        yield from super().findings()
        if Path(self.firecracker_path).name != BINARY:
            yield Finding(
                path=("firecracker_path",),
                what=f'the file is called "{Path(self.firecracker_path).name}", and the jailer names directories by it',
                accepted=f"a path that ends in /{BINARY}",
            )
        length = socket_length(self.chroot_base)
        if length > SOCKET_PATH_BYTES_MOST:
            yield Finding(
                path=("chroot_base",),
                what=f"the API sockets in it would have paths of {length} bytes, the kernel takes "
                f"{SOCKET_PATH_BYTES_MOST}",
                accepted=f"a path shorter by {length - SOCKET_PATH_BYTES_MOST} bytes, such as /srv/jailer",
            )

    def warnings(self) -> Iterator[Finding]:
        """Yield what is allowed and probably not meant."""
        yield from super().warnings()
        for index, label_set in enumerate(self.label_sets):
            limits = label_set.resources.limits
            if 0 < limits.memory_bytes < 1024 * 1024:
                yield Finding(
                    path=("label_sets", index, "resources"),
                    what="less than a MiB of memory counts as no limit",
                    accepted="a limit of some MiB, or none",
                )

    def environment(self, labels: tuple[str, ...]) -> Mapping[str, str]:
        """Return the label set's `env`: secret, never logged."""
        label_set = self.label_set(labels)
        assert isinstance(label_set, FirecrackerLabelSet)
        return label_set.env

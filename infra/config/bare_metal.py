"""The keys of the `bare-metal` backend: agents as processes of the coordinator's own host."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from msgspec import Meta

from infra.config.kinds import AbsolutePath, Argument, Environment
from infra.config.problems import Finding
from infra.config.scaler import LabelSet, NetworkPolicy, ScalerConfig


class BareMetalLabelSet(LabelSet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to start: `binary_path` with `args`, in `working_directory` (None: one of the agent's own)."""

    binary_path: AbsolutePath
    args: Annotated[tuple[Argument, ...], Meta(max_length=1024)] = ()
    env: Environment = {}
    working_directory: AbsolutePath | None = None
    network_policy: NetworkPolicy | None = None

    def __repr__(self) -> str:
        # The environment is secret, and a representation ends up in log lines.
        return f"BareMetalLabelSet(labels={self.labels!r}, binary_path={self.binary_path!r})"


class BareMetalScaler(ScalerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host processes. `enforce_cgroups`: refuse to start an agent whose limits the kernel cannot hold."""

    backend: Literal["bare-metal"]
    label_sets: Annotated[tuple[BareMetalLabelSet, ...], Meta(min_length=1, max_length=64)]
    enforce_cgroups: bool = False

    def warnings(self) -> Iterator[Finding]:
        """Yield what is allowed and probably not meant."""
        yield from super().warnings()
        for index, label_set in enumerate(self.label_sets):
            if label_set.network_policy is not None:
                yield Finding(
                    path=("label_sets", index, "network_policy"),
                    what="cannot be enforced: host processes have the host's network",
                    accepted="no network_policy, or a backend with networks of its own",
                )

    def environment(self, labels: tuple[str, ...]) -> Mapping[str, str]:
        """Return the label set's `env`: secret, never logged."""
        label_set = self.label_set(labels)
        assert isinstance(label_set, BareMetalLabelSet)
        return label_set.env

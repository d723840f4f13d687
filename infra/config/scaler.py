"""What every scaler has in the fleet file, whatever its backend; a backend's module extends these structs."""

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from actors.decisions.capacity import ScalerRules
from actors.decisions.labels import (
    PLAIN_TAINTS,
    ROLES,
    Host,
    Platform,
    RoutableScaler,
    gate,
    shown,
    taints,
)
from actors.decisions.resources import ResourceSpec
from events import subjects
from infra.config.kinds import (
    Count,
    GraceSeconds,
    HostAccess,
    Labels,
    MandatoryLabels,
    Name,
    NatsUrl,
    Network,
    ResourceCap,
    Roles,
    Seconds,
)
from infra.config.problems import Finding

BEATS_LEAST = 3
"""Beats that fit into the grace at the least: one lost message must not end a job."""


class NetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent may reach. `host_access` None: the default of its backend; empty: nothing on the host."""

    allowlist: tuple[Network, ...] = ()
    deny_all: bool = False
    host_access: tuple[HostAccess, ...] | None = None


class LabelSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels a scaler can bring up an agent for, in canonical form, and what one such agent gets."""

    labels: Labels
    resources: ResourceSpec = ResourceSpec()


class ScalerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scaler. `roles` None: every role; empty: plain execution only. Lists of labels are canonical."""

    name: Name
    backend: str
    max_agents: Count
    label_sets: Annotated[tuple[LabelSet, ...], Meta(min_length=1, max_length=64)]
    max_concurrent_spawns: Count = 8
    mandatory_labels: MandatoryLabels = ()
    platform: Platform | None = None
    roles: Roles | None = None
    resource_cap: ResourceCap = ResourceCap()
    spawn_timeout_s: Seconds = 300.0
    register_timeout_s: Seconds = 300.0
    beat_every_s: Seconds = 10.0
    heartbeat_grace_s: Seconds = 120.0
    stop_grace_s: GraceSeconds = 5.0
    nats_url: NatsUrl | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the scaler as a whole. Must hold on every machine: knows no host."""
        if self.heartbeat_grace_s < BEATS_LEAST * self.beat_every_s:
            yield Finding(
                path=("heartbeat_grace_s",),
                what=f"{self.heartbeat_grace_s:g} s of silence are fewer than {BEATS_LEAST} beats",
                accepted=f"{BEATS_LEAST * self.beat_every_s:g} or more, {BEATS_LEAST} times beat_every_s",
            )
        structured = frozenset(taints(self.platform))
        for index, label_set in enumerate(self.label_sets):
            required = gate(label_set.labels, self.mandatory_labels, self.platform)
            closed = [label for label in required if label not in {*label_set.labels, *structured}]
            if closed:
                yield Finding(
                    path=("label_sets", index, "labels"),
                    what=f"no job can reach it: it must ask for {shown(closed)}, which label set {index} lacks",
                    accepted=f"labels with every one of the scaler's mandatory_labels {shown(self.mandatory_labels)}",
                )

    def warnings(self) -> Iterator[Finding]:
        """Yield what is allowed and probably not meant."""
        for index, label_set in enumerate(self.label_sets):
            plain = sorted(PLAIN_TAINTS.intersection(label_set.labels))
            if plain and self.platform is None:
                yield Finding(
                    path=("label_sets", index, "labels"),
                    what=f"{shown(plain)} makes this set one for jobs that ask for it",
                    accepted="a declared platform: {os: ..., arch: ...}",
                )

    def environment(self, labels: tuple[str, ...]) -> Mapping[str, str]:
        """Return what the declared label set adds to its agents' environment: secret, never logged."""
        del labels
        return {}

    def label_set(self, labels: tuple[str, ...]) -> LabelSet:
        """Return the label set with these declared labels, the first of equals.

        Raises:
            KeyError: there is none; the configuration has changed since.
        """
        for label_set in self.label_sets:
            if label_set.labels == labels:
                return label_set
        raise KeyError(f"scaler {self.name} has no label set {shown(labels)}")

    def routable(self, host: Host, *, retiring: bool = False) -> RoutableScaler:
        """Return what matching needs to know, on this host."""
        roles = self.roles
        return RoutableScaler(
            name=self.name,
            backend=self.backend,
            label_sets=tuple(label_set.labels for label_set in self.label_sets),
            mandatory_labels=self.mandatory_labels,
            platform=self.platform,
            roles=None if roles is None else tuple(role for role in ROLES if role in roles),
            retiring=retiring,
            host=host,
        )

    def rules(self, coordinator: str) -> ScalerRules:
        """Return what admission needs to know, for a scaler whose machines run on its coordinator's host."""
        return ScalerRules(
            name=self.name,
            backend=self.backend,
            slot=subjects.local_backend(coordinator, self.name),
            max_agents=self.max_agents,
            max_concurrent_spawns=self.max_concurrent_spawns,
            max_cpus=self.resource_cap.max_cpus,
            max_memory_bytes=self.resource_cap.max_memory_bytes,
            spawn_timeout_s=self.spawn_timeout_s,
            register_timeout_s=self.register_timeout_s,
            heartbeat_grace_s=self.heartbeat_grace_s,
            beat_every_s=self.beat_every_s,
            label_sets=tuple(label_set.labels for label_set in self.label_sets),
        )

"""The keys of the `event` backend: machines that a provisioner of the customer's own starts and ends."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from actors.decisions.capacity import ScalerRules
from actors.decisions.scale import TARGETS_MOST
from events import subjects
from infra.config.kinds import Count, Name, Seconds
from infra.config.problems import Finding
from infra.config.scaler import LabelSet, ScalerConfig


class EventScaler(ScalerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cloud machines. `max_agents` is the whole cluster's; coordinators that share the scaler share its slots.

    `teardown_timeout_s`: a `scale.down` that nobody has confirmed by then is offered again. `max_concurrent_spawns` is
    wide by default, since nothing of ours is busy while a provisioner works.
    """

    backend: Literal["event"]
    label_sets: Annotated[tuple[LabelSet, ...], Meta(min_length=1, max_length=64)]
    provisioning_targets: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=TARGETS_MOST)]
    claim_ttl_s: Seconds = 300.0
    teardown_timeout_s: Seconds = 600.0
    max_concurrent_spawns: Count = 1000

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the scaler as a whole."""
        yield from super().findings()
        seen: set[str] = set()
        for index, target in enumerate(self.provisioning_targets):
            if target in seen:
                yield Finding(
                    path=("provisioning_targets", index),
                    what=f"{target} is named twice",
                    accepted="each target once",
                )
            seen.add(target)

    def warnings(self) -> Iterator[Finding]:
        """Yield what is allowed and probably not meant."""
        yield from super().warnings()
        if self.nats_url is None:
            yield Finding(
                path=("nats_url",),
                what="missing: machines elsewhere are told the coordinator's own address of NATS",
                accepted="the address at which they reach it, such as tls://nats.example.com:4222",
            )

    def rules(self, coordinator: str) -> ScalerRules:
        """Return what admission needs to know; the terms of offers come when NATS' address is known."""
        return msgspec.structs.replace(
            super().rules(coordinator),
            slot=subjects.event_backend(self.name),
            targets=self.provisioning_targets,
        )

"""What a coordinator says of itself when it is asked how it is."""

import os
from typing import TYPE_CHECKING

from infra.api.messages import ServerStatus, StatusAnswer, SweepTally, Unaccounted, ViewStatus
from infra.config.fleet import digest
from infra.reclaiming import Tally

if TYPE_CHECKING:
    from infra.app import Coordinator


def status_answer(coordinator: "Coordinator") -> StatusAnswer:
    """Return the answer to `status`; asks nobody else, so that a busy coordinator answers as well."""
    servers = coordinator.servers
    return StatusAnswer(
        coordinator=coordinator.site.coordinator,
        now=coordinator.clock.now(),
        host=coordinator.site.host,
        pid=os.getpid(),
        release=coordinator.release,
        started_at=coordinator.started_at,
        config_digest=digest(coordinator.options.config),
        views=tuple(
            ViewStatus(
                view=status.view,
                stage=status.stage,
                sequence=status.sequence,
                head=status.head,
                lag_s=status.lag_s,
                reason=status.reason,
            )
            for status in (projector.status() for projector in coordinator.projectors)
        ),
        servers=tuple(
            ServerStatus(
                name=name,
                running=server.status.running,
                restarts=server.status.restarts,
                trouble=server.status.trouble,
                durability=servers.durability if name == "nats" else "",
            )
            for name, server in sorted(servers.embedded.items())
        ),
        unaccounted=tuple(
            Unaccounted(kind=resource.kind, name=resource.name, detail=resource.detail)
            for resource in coordinator.unaccounted
        ),
        notes=coordinator.notes(),
        sweeps=_sweeps(coordinator.care.tally),
    )


def _sweeps(tally: Tally) -> SweepTally:
    return SweepTally(
        sweeps=tally.sweeps,
        reaped=sum(tally.reaped.values()),
        spared=sum(tally.spared.values()),
        failed=tally.failing,
        unlisted=tally.unlistable,
    )

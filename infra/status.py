"""What a coordinator says of itself when it is asked how it is."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from infra.api.messages import ServerStatus, StatusAnswer, SweepTally, Unaccounted, ViewStatus
from infra.config.fleet import digest
from infra.reclaiming import Tally
from projections.vm import VmState

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


def notes_of(lacks: Mapping[str, Sequence[str]], unserved: Iterable[VmState]) -> tuple[str, ...]:
    """Return what an operator should know: scalers that cannot start machines, and machines without a scaler."""
    notes = [f"scaler {name} is degraded, the others work: {'; '.join(why)}" for name, why in lacks.items()]
    left = sorted(state.scaler for state in unserved)
    if left:
        names = ", ".join(dict.fromkeys(left))
        notes.append(
            f"{len(left)} live machines belong to scalers the fleet file no longer has: {names}: bring them back "
            "until they have drained"
        )
    return tuple(notes)

"""What the tests of metrics share: a clock set by hand, a registry with its figures, and facts."""

from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from events.envelope import Event, Recorded
from events.vm import (
    Handle,
    Requested,
)
from infra.metrics.fleet_metrics import FleetMetrics
from infra.metrics.lives import Lives

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
HANDLE = Handle(driver="scripted", version=1, data={})


class HandClock:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.at = BEGIN

    def now(self) -> datetime:
        return self.at

    def monotonic_s(self) -> float:
        return (self.at - BEGIN).total_seconds()

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class Bench:
    """Metrics on a registry of their own, and facts told to them."""

    def __init__(self, scalers: dict[str, str] | None = None, *, lives: Lives | None = None) -> None:
        self.clock = HandClock()
        self.registry = CollectorRegistry()
        self.metrics = FleetMetrics(
            self.registry,
            self.clock,
            coordinator="alpha",
            version="1.2",
            scalers={"small": "bare-metal"} if scalers is None else scalers,
            lives=lives,
        )
        self._sequence = 0
        self._versions: dict[str, int] = {}

    def tell(self, vm: str, event: Event, after_s: float = 0.0) -> Recorded:
        self.clock.advance(after_s)
        self._sequence += 1
        version = self._versions[vm] = self._versions.get(vm, 0) + 1
        fact = recorded(vm, event, version, self.clock.at, self._sequence)
        self.metrics.observe(fact)
        return fact

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"fleetlog_{name}", labels)

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in self.registry.collect()
            for sample in family.samples
        }


def recorded(vm: str, event: Event, version: int, at: datetime, sequence: int = 1) -> Recorded:
    return Recorded(
        sequence=sequence,
        aggregate=f"vm.{vm}",
        version=version,
        at=at,
        writer="alpha",
        epoch=0,
        cause="c",
        correlation="c",
        attempt="a",
        event=event,
    )


def requested(scaler: str = "small", job: str | None = None, **changes: Any) -> Requested:
    return Requested(
        scaler=scaler,
        backend="bare-metal",
        slot=f"backend.alpha.{scaler}",
        owner="alpha",
        host="h",
        boot_id="b",
        labels=("linux",),
        job=job,
        **changes,
    )


# The table.

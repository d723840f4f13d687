"""What a coordinator shows to those who watch it: metrics, their sampling, and `/health` and `/metrics` over HTTP."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from infra.http.health import Health, assess
from infra.http.server import HttpServer
from infra.metrics.fleet_metrics import FleetMetrics
from infra.metrics.lag import ProjectionLag
from infra.metrics.readings import (
    Reading,
    actor_readings,
    log_readings,
    message_readings,
    projection_readings,
    ready_readings,
    redelivery_readings,
    resource_readings,
    scaler_readings,
    server_readings,
    sweep_readings,
)
from infra.metrics.sampler import Sampler, Source
from projections.vm import VmState

if TYPE_CHECKING:
    from infra.app import Coordinator


class Watch:
    """Counts from the first fact on; sampling and HTTP begin with `start`."""

    def __init__(self, coordinator: "Coordinator", found: Iterable[VmState]) -> None:
        """Take the lives a boot has found; to be made before any actor starts."""
        self._coordinator = coordinator
        self._registry = CollectorRegistry()
        self.metrics = FleetMetrics(
            self._registry,
            coordinator.clock,
            coordinator=coordinator.site.coordinator,
            version=coordinator.release,
            scalers={scaler.name: scaler.backend for scaler in coordinator.options.config.scalers},
        )
        self.metrics.seed(found)
        coordinator.world.router.observers.append(self.metrics.observe)
        coordinator.fleet.refusals.append(self.metrics.refused)
        lag = ProjectionLag(
            lambda: [projector.status() for projector in coordinator.projectors],
            lambda: coordinator.journal.headroom().last_sequence,
            time.monotonic,
        )
        most = coordinator.options.config.global_max_agents
        self._log = Source("log", coordinator.journal.headroom, log_readings)
        self._views = Source("projections", lag.look, projection_readings)
        self._lacks = Source("host parts", coordinator.hosting.lacks, self._ready)
        self._sources: tuple[Source[Any], ...] = (
            self._log,
            self._views,
            self._lacks,
            Source("scalers", coordinator.fleet.scalers, lambda statuses: scaler_readings(statuses, most)),
            Source("servers", self._servers, server_readings),
            Source("agents", self._agents, message_readings),
            Source("actors", lambda: coordinator.supervisor.restarts, actor_readings),
            Source("consumers", coordinator.journal.redeliveries, redelivery_readings),
            Source("host", lambda: coordinator.unaccounted, resource_readings),
            Source("sweeps", lambda: coordinator.care.tally, sweep_readings),
        )
        self._sampler = Sampler(self.metrics, self._sources)
        self._http = HttpServer(coordinator.options.http, self.health, self._registry)

    def _servers(self) -> dict[str, Any]:
        return {name: server.status for name, server in self._coordinator.servers.embedded.items()}

    def _ready(self, lacks: Mapping[str, Any]) -> Iterable[Reading]:
        scalers = self._coordinator.options.config.scalers
        return ready_readings({scaler.name: scaler.backend for scaler in scalers}, lacks)

    def _agents(self) -> Mapping[tuple[str, str], int]:
        return self._coordinator.agent_door.counts()

    def start(self) -> str:
        """Begin to sample and to serve; return the address served at.

        Raises:
            AddressRefused: the address cannot be listened on.
        """
        self._sampler.start()  # first, so that no health check comes before the first figures
        return self._http.start()

    def stop(self) -> None:
        """End both. Repeatable."""
        self._http.stop()
        self._sampler.stop()

    def health(self) -> Health:
        """Return how the coordinator is, from what was sampled last."""
        coordinator = self._coordinator
        return assess(
            coordinator=coordinator.site.coordinator,
            version=coordinator.release,
            connected=coordinator.connection.connected,
            headroom=self._log.latest(),
            views=self._views.latest(),
            servers=self._servers(),
            failures=self.metrics.recent_failures(),
            lacks=self._lacks.latest() or {},
        )

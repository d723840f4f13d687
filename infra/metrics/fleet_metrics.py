"""Counts the fleet: from facts as they are appended, from refusals as they are given, and from what is sampled."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from actors.commands import Answer, AnswerKind
from actors.ports import Clock
from events.envelope import Recorded
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Reaped,
    Reason,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownConfirmed,
    TeardownFailed,
    VmEvent,
)
from infra.metrics.catalogue import BY_NAME, METRICS, RECENT_S, ROLLUP, SPAWN_BUCKETS_S
from infra.metrics.exposition import Figures, families
from infra.metrics.labels import Vocabulary
from infra.metrics.lives import LIVE_PHASES, PHASES, Life, Lives
from infra.metrics.readings import Reading
from infra.metrics.tally import Series, Tally
from projections import failures
from projections.backend import Gate
from projections.failures import FailureRow, ScalerFailures
from projections.vm import VmState

_log = logging.getLogger("fleetlog.metrics")

SCALERS_MAX = 2000
"""Twice what a fleet file may have: scalers that a reload removed keep their counters."""

STALE_AFTER_S = 30.0
"""Sampled figures older than this are left out and their source is down: longer than one slow answer, no more."""


class FleetMetrics(Collector):
    """Every metric of one coordinator. Thread safe; nothing here does I/O or raises into the fleet.

    A scrape reads what was counted and last published. Label values come from small vocabularies: scaler names
    only as configured, everything else bounded, never an agent or a job.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        *,
        coordinator: str,
        version: str,
        scalers: Mapping[str, str],
        lives: Lives | None = None,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        """Take the place in the registry; `scalers` is name -> backend type, as configured."""
        self._clock = clock
        self._coordinator = coordinator
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._lives = Lives() if lives is None else lives
        self._tally = Tally(SPAWN_BUCKETS_S)
        self._failures: tuple[FailureRow, ...] = ()
        self._published: dict[str, tuple[float, dict[Series, float]] | None] = {}
        self._scalers: dict[str, str] = {}
        self._raised = False
        self._words = {label: Vocabulary(room=32) for metric in METRICS for label in metric.labels}
        self._words["scaler"] = Vocabulary([ROLLUP])
        self._words["reason"] = Vocabulary(get_args(Reason))
        self._words["state"] = Vocabulary(LIVE_PHASES)
        self._words["gate"] = Vocabulary(get_args(Gate))
        self._words["bound"] = Vocabulary(["true", "false"])
        self._words["kind"] = Vocabulary(get_args(AnswerKind), room=32)
        self._constant: dict[Series, float] = {
            ("fleetlog_process_start_time_seconds", ()): clock.now().timestamp(),
            ("fleetlog_build_info", (version, coordinator)): 1.0,
        }
        self.configure(scalers)
        registry.register(self)

    def configure(self, scalers: Mapping[str, str]) -> None:
        """Take the scalers of a newly applied configuration; their series appear with zeros."""
        with self._lock:
            self._words["scaler"].add(scalers, SCALERS_MAX)
            self._scalers = dict(scalers)
            self._tally.count("fleetlog_facts_uncounted_total", by=0)
            for scaler, backend in scalers.items():
                requested = ("fleetlog_agents_requested_total", scaler, backend)
                self._tally.count(*self._series(*requested), by=0)
            for backend in sorted({*scalers.values()}):
                for name in ("agents_reaped", "agents_taken_up", "teardown_failures"):
                    self._tally.count(*self._series(f"fleetlog_{name}_total", backend), by=0)
                for name in ("fleetlog_spawn_seconds", "fleetlog_demand_to_registered_seconds"):
                    self._tally.histogram(*self._series(name, backend))

    def seed(self, states: Iterable[VmState]) -> None:
        """Begin with the lives a boot has found, in place of all followed so far; nothing is counted as new.

        To be called before any actor starts. Those of other coordinators are theirs to export.
        """
        with self._lock:
            self._lives.clear()
            for state in states:
                if state.live and state.owner == self._coordinator:
                    self._lives.begin(state.id, self._life(state))

    def observe(self, fact: Recorded) -> None:
        """Count a fact. Called from actors' threads: microseconds, no I/O, never raises.

        A fact seen before is not counted again.
        """
        if not fact.aggregate.startswith("vm."):
            return
        try:
            with self._lock:
                self._take(fact.aggregate.removeprefix("vm."), fact)
        except Exception:  # noqa: BLE001 - a figure may be wrong, the actor must go on
            first, self._raised = not self._raised, True
            if first:
                _log.exception("a fact could not be counted; said once, metrics may be short: %s", fact.id)

    def refused(self, answer: Answer) -> None:
        """Count one agent refused."""
        with self._lock:
            self._tally.count(*self._series("fleetlog_refusals_total", answer.kind, answer.cap or "none"))

    def publish(self, source: str, readings: Iterable[Reading] | None) -> None:
        """Replace all figures of a source; None: it cannot be read, and its figures are left out."""
        figures: dict[Series, float] = {}
        with self._lock:
            for metric, labels, value in readings or ():
                series = self._series(metric, *labels)
                figures[series] = figures.get(series, 0.0) + value  # several `other` add up
            known = self._words["source"].word(source)
            self._published[known] = None if readings is None else (self._clock.monotonic_s(), figures)

    def recent_failures(self, window_s: float = RECENT_S) -> dict[str, ScalerFailures]:
        """Return what failed in the last `window_s` seconds, by scaler."""
        return failures.window(self._failures, self._clock.now(), timedelta(seconds=window_s))

    def collect(self) -> Iterator[Family]:
        """Yield every family of the table, in its order, as of now."""
        recent = self.recent_failures()
        with self._lock:
            figures = Figures(
                values={**self._constant, **self._tally.counters, **self._gauges(recent), **self._sampled()},
                histograms={series: each.copy() for series, each in self._tally.histograms.items()},
            )
        yield from families(figures)

    def describe(self) -> Iterator[Family]:
        """Yield every family without samples, so that a registry can tell names that clash."""
        yield from families(Figures(values={}, histograms={}))

    def _series(self, name: str, *values: str) -> Series:
        metric = BY_NAME[name]
        words = (self._words[label].word(value) for label, value in zip(metric.labels, values, strict=True))
        return name, tuple(words)

    def _life(self, state: VmState) -> Life:
        return Life(
            scaler=self._words["scaler"].word(state.scaler),
            backend=self._words["backend"].word(state.backend),
            phase=state.phase,
            version=state.version,
            bound=state.job is not None,
            requests=state.requests,
            requested_at=state.requested_at,
            started_at=state.started_at,
        )

    def _take(self, vm: str, fact: Recorded) -> None:
        event = fact.event
        life = self._lives.get(vm)
        if isinstance(event, Requested):
            if life is None:
                self._begin(vm, event, fact)
            return
        if life is None:
            self._tally.count("fleetlog_facts_uncounted_total")
            return
        if fact.version <= life.version:
            return
        life.version = fact.version
        self._step(vm, life, fact)
        phase = PHASES.get(type(event))
        if phase is not None:
            self._lives.move(vm, life, phase)

    def _begin(self, vm: str, event: Requested, fact: Recorded) -> None:
        life = Life(
            scaler=self._words["scaler"].word(event.scaler),
            backend=self._words["backend"].word(event.backend),
            phase="requested",
            version=fact.version,
            bound=event.job is not None,
            requests=event.requests,
            requested_at=fact.at,
        )
        self._tally.count("fleetlog_agents_requested_total", (life.scaler, life.backend))
        self._lives.begin(vm, life)

    def _step(self, vm: str, life: Life, fact: Recorded) -> None:
        """Count what this fact says about a life, which is still in the phase before it."""
        tally, backend = self._tally, life.backend
        event: VmEvent = fact.event
        match event:
            case SpawnStarted():
                life.started_at = fact.at
            case Spawned():
                if life.started_at is not None:
                    spent_s = (fact.at - life.started_at).total_seconds()
                    tally.histogram("fleetlog_spawn_seconds", (backend,)).observe(max(0.0, spent_s))
            case Registered():
                spent_s = (fact.at - life.requested_at).total_seconds()
                waited = tally.histogram("fleetlog_demand_to_registered_seconds", (backend,))
                waited.observe(max(0.0, spent_s))
            case Draining(reason=reason) | Failed(reason=reason):
                if life.phase not in ("draining", "failed"):
                    tally.count(*self._series("fleetlog_agents_ended_total", backend, reason))
                if isinstance(event, Failed):
                    self._fail(vm, life, event, fact)
            case TeardownFailed():
                tally.count("fleetlog_teardown_failures_total", (backend,))
            case Reaped():
                tally.count("fleetlog_agents_reaped_total", (backend,))
            case TakenUp():
                tally.count("fleetlog_agents_taken_up_total", (backend,))
            case Requested() | ConfigAcked() | Adopted() | Condemned() | Spared() | TeardownConfirmed():
                pass

    def _fail(self, vm: str, life: Life, event: Failed, fact: Recorded) -> None:
        bound = "true" if life.bound else "false"
        self._tally.count(*self._series("fleetlog_failures_total", life.backend, event.reason, bound))
        row = FailureRow(
            sequence=fact.sequence,
            at=fact.at,
            vm=vm,
            scaler=life.scaler,
            backend=life.backend,
            bound=life.bound,
            reason=event.reason,
            detail=event.detail,
        )
        self._failures = failures.evolve(self._failures, row)

    def _gauges(self, recent: Mapping[str, ScalerFailures]) -> dict[Series, float]:
        """Return what the lives add up to; every configured scaler has its series, also when it has no life."""
        found: dict[Series, float] = {}
        for scaler, backend in self._scalers.items():
            for phase in LIVE_PHASES:
                found[self._series("fleetlog_agents", scaler, backend, phase)] = 0
            for name in ("fleetlog_cpus_reserved", "fleetlog_memory_reserved_bytes"):
                found[self._series(name, scaler, backend)] = 0
            for bound in ("true", "false"):
                found[self._series("fleetlog_recent_failures", scaler, bound)] = 0
        for state, count in self._lives.states():
            found["fleetlog_agents", state] = count
        cpus, memory_bytes = 0.0, 0
        for key, reserved in self._lives.reserved():
            found["fleetlog_cpus_reserved", key] = reserved.cpus
            found["fleetlog_memory_reserved_bytes", key] = reserved.memory_bytes
            cpus, memory_bytes = cpus + reserved.cpus, memory_bytes + reserved.memory_bytes
        found["fleetlog_cpus_reserved", (ROLLUP, "")] = round(cpus, 6)
        found["fleetlog_memory_reserved_bytes", (ROLLUP, "")] = memory_bytes
        for scaler, each in recent.items():
            found["fleetlog_recent_failures", (scaler, "true")] = each.bound
            found["fleetlog_recent_failures", (scaler, "false")] = each.unbound
        return found

    def _sampled(self) -> dict[Series, float]:
        """Return the published figures that are fresh; the others are down, never frozen."""
        now_s = self._clock.monotonic_s()
        found: dict[Series, float] = {}
        for source, published in self._published.items():
            fresh = published is not None and now_s - published[0] <= self._stale_after_s
            found["fleetlog_source_up", (source,)] = float(fresh)
            if published is not None and fresh:
                found.update(published[1])
        return found

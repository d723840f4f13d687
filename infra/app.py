"""The composition root: the only place that knows every class, and the order in which a coordinator comes up."""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.decisions.capacity import ScalerRules, Site
from actors.decisions.labels import explain
from actors.driver import Resource
from actors.fleet import Fleet, Routing
from actors.host import SWEEP_EVERY_S, Caring, Host
from actors.pooled import ActorPool
from actors.ports import AgentAccess
from actors.projector import Projector
from actors.supervisor import Supervisor
from actors.sweep import Report
from actors.world import Router, World
from events import subjects
from events.coordinator import ConfigApplied, Started
from events.envelope import Recorded
from infra.agent.door import AgentDoor
from infra.agent.late_link import LateLink
from infra.api.door import ApiDoor, Knowledge
from infra.boot import Booted, boot
from infra.clock import SystemClock, ThreadTimers
from infra.collector import collect_seldom
from infra.config.fleet import FleetConfig, digest
from infra.crash import crash_points
from infra.drivers.catalogue import AgentLines
from infra.effects import ThreadEffects
from infra.embedded.data_directory import DataDirectory
from infra.host import boot_id, check_disk, host_name, platform_labels
from infra.hosting import Hosting
from infra.ids import SystemIds
from infra.journal.connection import NatsConnection
from infra.journal.nats import NatsJournal
from infra.microvm_disk import make_room
from infra.postgres.database import Database
from infra.postgres.queries import Queries
from infra.postgres.rows import PostgresRows
from infra.provision.door import ProvisionDoor
from infra.reclaiming import HostCare
from infra.servers import ServerOptions, Servers
from infra.status import notes_of, status_answer
from infra.verify import verify_host
from infra.watch import Watch
from projections.catalogue import VIEWS
from projections.vm import VmState

logger = logging.getLogger("fleetlog.coordinator")

SPAWN_WIDTH = 8
TEARDOWN_WIDTH = 16
READ_WIDTH = 4
"""Threads that wait for hosts and the log. Scalers bound their own spawns; teardowns mostly wait out a grace."""

STOP_S = 15.0
"""How long an orderly end may take before it names what is still busy and goes [3.16]."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One coordinator, as it was asked for. Names that are None come from the fleet file, then from the host."""

    data_directory: Path
    config: FleetConfig
    servers: ServerOptions = field(default_factory=ServerOptions)
    cluster: str = "default"
    coordinator: str | None = None
    host: str | None = None
    http: str = "127.0.0.1:0"
    log_limit_bytes: int | None = None
    agent_credential_s: float = 3600.0
    agent_lines: AgentLines | None = None
    sweep_every_s: float = SWEEP_EVERY_S


class Coordinator:
    """One coordinator process: everything is opened in `start`, in order, and let go in `stop`, in reverse."""

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.environment = dict(os.environ if environment is None else environment)
        host = host_name(options.host or options.config.host)
        name = subjects.checked(options.coordinator or options.config.coordinator or host, "coordinator")
        self.site = Site(coordinator=name, host=host, boot_id=boot_id())
        self.cluster = subjects.checked(options.config.cluster or options.cluster, "cluster")
        self.clock = SystemClock()
        self.hosting = Hosting(options.config, self.site, cluster=self.cluster, clock=self.clock)
        self.ids = SystemIds()
        self.release = version("fleetlog")
        self.started_at = self.clock.now()
        self.router = Router()
        self.ending = threading.Event()
        self.fatal_reason: str | None = None
        self.projectors: tuple[Projector, ...] = ()
        self._unserved: tuple[VmState, ...] = ()
        self._link_up_since_s = math.inf
        self._closers = contextlib.ExitStack()

    # Up, in the order of design 6.

    def start(self) -> None:
        """Bring everything up; on any failure what was opened is let go again, and the error is raised."""
        try:
            self._start()
        except BaseException:
            self._closers.close()
            raise

    def _start(self) -> None:
        collect_seldom()
        # Before anything is written: on a full disk even the log of the refusal could not be.
        make_room(
            self.options.config,
            owner=self.site.coordinator,
            state=self.options.data_directory / "machines",
        )
        check_disk(self.options.data_directory)
        self.data = self._closers.enter_context(DataDirectory(self.options.data_directory))
        self.servers = Servers(self.options.servers, self.data, self.clock)
        self._closers.callback(self.servers.close)
        self._closers.callback(self.hosting.close)
        if self.options.servers.nats is not None:
            self.hosting.open_network(None)  # the embedded one opens it with its port
        self.servers.start(self.hosting.open_network)
        self._open_log()
        self._open_tables()
        booted = boot(self.journal, self._boot_tables)
        self._build_actors()
        self.hosting.settle_network(booted.state.vms, self.servers.address)
        self.watch = Watch(self, booted.state.vms.values())
        self.supervisor.boot(self._load(booted), self._applied(), self._started())
        self._say_booted(booted)
        self._follow_others(booted.state.last_sequence)
        self._open_doors()
        self._start_projectors()
        self._show()

    def _open_log(self) -> None:
        address = self.servers.address
        self.connection = NatsConnection(address, name=f"fleetlog {self.site.coordinator}")
        self._closers.callback(self.connection.close)
        self.connection.on_state(self._connection_changed)
        limit = self.options.log_limit_bytes
        self.journal = NatsJournal(
            address,
            self.cluster,
            name=f"fleetlog {self.site.coordinator} log",
            live_machines=lambda: len(self.router.vms),
            **({} if limit is None else {"limit_bytes": limit}),
        )
        self._closers.callback(self.journal.close)

    def _connection_changed(self, connected: bool) -> None:  # noqa: FBT001 - the connection's callback
        """Silence counts only while agents can be heard."""
        self._link_up_since_s = self.clock.monotonic_s() if connected else math.inf

    def _open_tables(self) -> None:
        self.database = None
        if self.servers.dsn is not None:
            self.database = Database(self.servers.dsn, self.cluster)
            self._closers.callback(self.database.close)

    @property
    def _boot_tables(self) -> Queries | None:
        return None if self.database is None else Queries(self.database)

    def _load(self, first: Booted) -> Callable[[], Any]:
        """Return what loads the fleet: what boot found the first time, anew when the log moved meanwhile."""
        found: list[Booted] = [first]
        return lambda: (found.pop() if found else boot(self.journal, self._boot_tables)).state

    def _build_actors(self) -> None:
        crash = crash_points(self.environment)
        self.hosting.build(
            state=self.data.path / "machines",
            environment=self.environment,
            lines=self.options.agent_lines,
            reach=crash.reach,
            address=self.servers.address,
            signer=self.servers.signer,
            credential_s=self.options.agent_credential_s,
        )
        rules = self.hosting.rules
        pool = ActorPool()
        timers = ThreadTimers()
        effects = {
            name: ThreadEffects(name, width=width)
            for name, width in (
                ("spawn", SPAWN_WIDTH),
                ("teardown", TEARDOWN_WIDTH),
                ("read", READ_WIDTH),
                ("reclaim", 1),
            )
        }
        links = LateLink()
        self.world = World(
            site=self.site,
            rules={rule.slot: rule for rule in rules.values()},
            drivers=self.hosting.drivers,
            journal=self.journal,
            clock=self.clock,
            timers=timers,
            ids=self.ids,
            spawns=effects["spawn"],
            teardowns=effects["teardown"],
            reads=effects["read"],
            access=dict[str, AgentAccess](self.hosting.access),
            pools=self.hosting.pools(),
            occupied=self.hosting.occupied,
            link=links,
            crash=crash,
            pool=pool,
            new_abort=threading.Event,
            link_up_since_s=lambda: self._link_up_since_s,
            fatal=self._fatal,
            router=self.router,
        )
        self.links = links
        self.fleet = Fleet(self.world, self._routing(rules))
        self.care = HostCare(
            self.options.config,
            self.site.coordinator,
            self.data.path / "machines",
            drivers=self.hosting.drivers.values(),
            network=self.hosting.network,
            reach=crash.reach,
        )
        self._closers.callback(self.care.close)
        self.host = Host(self.world)
        prepare = partial(self.care.at_boot, self.world)
        self.supervisor = Supervisor(self.world, settle=_settle, prepare=prepare)
        self.supervisor.caring = Caring(
            self.care.sweeper, effects["reclaim"], self._swept, self.options.sweep_every_s
        )
        for stop in (*(each.stop for each in effects.values()), timers.stop):
            self._closers.callback(stop)
        self._closers.callback(
            lambda: self.supervisor.stop(self.fatal_reason or "asked to", timeout_s=STOP_S)
        )

    def _swept(self, report: Report) -> None:
        self.care.done(report)
        self.hosting.note_strangers(self.care.strangers)

    def _routing(self, rules: dict[str, ScalerRules]) -> Routing:
        config, host = self.options.config, platform_labels()
        return Routing(
            scalers=tuple(scaler.routable(host) for scaler in config.scalers),
            rules=rules,
            resources={
                scaler.name: tuple(label_set.resources for label_set in scaler.label_sets)
                for scaler in config.scalers
            },
            defaults=config.defaults.resources,
        )

    def _applied(self) -> ConfigApplied:
        config = self.options.config
        return ConfigApplied(
            digest=digest(config), global_max_agents=config.global_max_agents, scalers=config.summary()
        )

    def _started(self) -> Started:
        return Started(host=self.site.host, boot_id=self.site.boot_id, pid=os.getpid(), version=self.release)

    def _say_booted(self, booted: Booted) -> None:
        self._unserved = tuple(
            state
            for state in booted.state.vms.values()
            if state.owner == self.site.coordinator and state.slot not in self.world.drivers
        )
        for note in self.notes():
            logger.warning("%s", note)
        taken_up = len(self.supervisor.taken_up)
        logger.info(
            "the fleet is known: %d live, %d taken up again, from the %s (%d facts replayed in %.2f s)",
            len(booted.state.vms),
            taken_up,
            booted.source,
            booted.replayed,
            booted.took_s,
        )
        self.hosting.note_strangers(self.care.strangers)

    def _follow_others(self, after: int) -> None:
        """Hand facts that other processes append to the actors concerned; learn at once of one with our id."""
        own = self.site.coordinator

        def deliver(fact: Recorded) -> None:
            if fact.writer == own:
                self.supervisor.heed(fact)
            else:
                self.router.foreign(fact)

        self._closers.callback(self.journal.follow(after, deliver).stop)

    def _open_doors(self) -> None:
        renewer = self.hosting.renewer(self.router.slots)
        self.agent_door = AgentDoor(self.connection, self.cluster, self.fleet, renewer, self.clock)
        self.links.door = self.agent_door
        self._closers.callback(self.agent_door.close)
        self.agent_door.start()
        knowledge = Knowledge(
            status=lambda: status_answer(self),
            explain=lambda labels, exclude: explain(self.fleet.routing.scalers, labels, exclude),
            verify_host=self.verify_host,
            care=self.host,
            host=self.site.host,
        )
        self.api_door = ApiDoor(
            self.connection,
            self.cluster,
            self.site.coordinator,
            self.fleet,
            ids=self.ids,
            knowledge=knowledge,
        )
        self._closers.callback(self.api_door.close)
        self.api_door.start()
        self.provision_door = ProvisionDoor(self.connection, self.cluster, self.site.coordinator, self.fleet)
        self._closers.callback(self.provision_door.close)
        self.provision_door.start()

    def _start_projectors(self) -> None:
        if self.database is None:
            return
        rows = PostgresRows(self.database)
        self.projectors = tuple(Projector(self.journal, rows, view, self.clock) for view in VIEWS)
        for projector in self.projectors:
            self._closers.callback(projector.stop)
            projector.start()

    def _show(self) -> None:
        """Open `/health` and `/metrics`, and say where everything is."""
        self._closers.callback(self.watch.stop)
        address = self.watch.start()
        creds = self.servers.operator_creds
        self.data.publish_runtime(
            coordinator=self.site.coordinator,
            nats_url=self.servers.address.url,
            nats_creds=creds,
            postgres_dsn=self.servers.dsn,
            http_address=address,
        )
        logger.info(
            "coordinator %s of cluster %s is up: http://%s/health",
            self.site.coordinator,
            self.cluster,
            address,
        )

    # What others ask.

    @property
    def unaccounted(self) -> tuple[Resource, ...]:
        """What the last sweep left on the host although nobody answers for it."""
        return self.care.unaccounted

    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know and may have missed."""
        return notes_of(self.hosting.lacks(), self._unserved)

    def verify_host(self) -> Any:
        """Compare what the log says of this host with what is on it."""
        return tuple(verify_host(self.journal, self.site.host, self.hosting.surveys(), self.site.coordinator))

    # Down.

    def _fatal(self, reason: str) -> None:
        logger.critical("%s", reason)
        self.fatal_reason = self.fatal_reason or reason
        self.ending.set()

    def stop(self) -> None:
        """Let go of everything, in reverse order; machines run on. Repeatable."""
        self.ending.set()
        self._closers.close()


def _settle(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `done`, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.002)

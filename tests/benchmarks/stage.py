"""Where benchmarks run: temporary data directories, real servers in them, and coordinators as `fleetlog up` makes them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from infra.app import Coordinator, Options
from infra.clock import SystemClock
from infra.config.bare_metal import BareMetalLabelSet, BareMetalScaler
from infra.config.fleet import FleetConfig
from infra.config.scaler import LabelSet, ScalerConfig
from infra.config.scripted import ScriptedScaler
from infra.embedded.data_directory import DataDirectory
from infra.journal.address import NatsAddress
from infra.servers import NO_TABLES, ServerOptions, Servers

CLUSTER = "bench"
COORDINATOR = "bench"
SCALER = "metal"
LABELS = ("linux",)


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. Rounds are repeated and the median counts."""

    rounds: int = 5
    singles: int = 500  # appends one after the other, each round
    agents: int = 4000  # machines that append in parallel, each round
    dead: tuple[int, ...] = (1_000, 10_000, 100_000)
    live: int = 1000
    demand_rate: int = 50  # a second
    demand_s: int = 5  # each round
    processes: int = 20  # real agents, one after the other
    idle: int = 10_000
    age_s: float = (
        310  # beyond the stream's dedup window of five minutes, whose facts NATS reads again at its start
    )


FULL = Scale()
QUICK = Scale(
    rounds=2, singles=200, agents=500, dead=(200, 1000), live=100, demand_s=2, processes=4, idle=1000, age_s=0
)


class Stage:
    """A temporary folder and the scale of this run."""

    def __init__(self, root: Path, scale: Scale) -> None:
        self.root = root
        self.scale = scale
        self._count = 0

    def directory(self, name: str) -> Path:
        """Return a new data directory's path."""
        self._count += 1
        return self.root / f"{self._count}-{name}"


def say(text: str) -> None:
    """Report progress."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    """Wait for something.

    Raises:
        TimeoutError: it did not come to be.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.001)


def scripted_scaler(most: int) -> ScriptedScaler:
    """Return a scaler whose machines are only told of."""
    return ScriptedScaler(
        name=SCALER,
        backend="scripted",
        max_agents=most,
        max_concurrent_spawns=100,
        register_timeout_s=3600,
        beat_every_s=600,
        heartbeat_grace_s=3600,
        label_sets=(LabelSet(labels=LABELS),),
    )


def process_scaler(command: tuple[str, ...]) -> BareMetalScaler:
    """Return a scaler of host processes."""
    return BareMetalScaler(
        name=SCALER,
        backend="bare-metal",
        max_agents=100,
        label_sets=(BareMetalLabelSet(labels=LABELS, binary_path=command[0], args=command[1:]),),
    )


def fleet(*scalers: ScalerConfig) -> FleetConfig:
    """Return a fleet file's content."""
    return FleetConfig(version=1, global_max_agents=100_000, scalers=scalers)


@contextlib.contextmanager
def coordinator(
    directory: Path,
    config: FleetConfig,
    *,
    tables: bool = False,
    ready: Callable[[Coordinator], None] | None = None,
) -> Iterator[Coordinator]:
    """Run a coordinator with embedded servers, every write synced."""
    options = Options(
        data_directory=directory,
        config=config,
        cluster=CLUSTER,
        coordinator=COORDINATOR,
        servers=ServerOptions(postgres=None if tables else NO_TABLES),
    )
    running = Coordinator(options)
    running.start()
    try:
        if ready is not None:
            ready(running)
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def servers(directory: Path, *, tables: bool = False) -> Iterator[Servers]:
    """Run the servers alone, as a coordinator would start them."""
    with DataDirectory(directory) as data:
        started = Servers(ServerOptions(postgres=None if tables else NO_TABLES), data, SystemClock())
        try:
            started.start()
            yield started
        finally:
            started.close()


def address_of(running: Coordinator) -> NatsAddress:
    """Return where its NATS is, with all rights of the account."""
    return running.servers.address

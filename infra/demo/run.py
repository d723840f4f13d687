"""The demonstration's plot: ask for six, kill the coordinator, start it again, wait for every end, look for leftovers."""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from actors.errors import LogUnavailable
from events.envelope import Recorded
from events.vm import Registered, Requested
from infra.api.client import ApiClient
from infra.api.messages import DemandRequest, RemoveRequest
from infra.config.bare_metal import BareMetalScaler
from infra.config.load import load
from infra.demo.leaks import belonging, leaks
from infra.demo.plays import BROKEN, BROKEN_CODE, MUTE, Play
from infra.demo.stage import Cast, Stage
from infra.drivers.bare_metal.driver import BareMetalDriver
from infra.drivers.catalogue import bare_metal_config
from infra.embedded.data_directory import Runtime
from infra.journal.address import NatsAddress
from infra.journal.connection import NatsConnection
from infra.journal.nats import NatsJournal
from infra.postgres.database import Database
from infra.postgres.rows import PostgresRows
from infra.verify import Difference, verify_tables
from projections.boot import fold_fleet
from projections.catalogue import VIEWS
from projections.vm import VmState, evolve

CLUSTER = "default"
WORKING_S = 20.0
ENDING_S = 40.0
LEVEL_S = 10.0
"""Bounds on each wait: the whole ends by itself in under a minute whatever happens."""

Tell = Callable[[str], None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. `ok` only if all that the demonstration promises was true."""

    ok: bool
    agents_requested: int
    agents_reaped: int
    taken_up_again: int
    leaks: int
    verify_clean: bool
    events: int
    demand_to_registered_ms_p50: float | None
    coordinator_down_ms: float
    took_s: float
    lives: tuple[VmState, ...]
    jobs: dict[str, str]  # vm -> what it was asked to be
    facts: tuple[Recorded, ...]
    killed_at: datetime
    left: tuple[str, ...]
    differences: tuple[str, ...]
    directory: str


class Eyes:
    """Looks at the log and asks the coordinator; opened anew for each coordinator, as each brings its servers."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        creds = None if runtime.nats_creds is None else Path(runtime.nats_creds)
        self.address = NatsAddress(url=runtime.nats_url, creds=creds)
        self._closers = contextlib.ExitStack()
        self.connection = NatsConnection(self.address, name="fleetlog demo")
        self._closers.callback(self.connection.close)
        self.journal = NatsJournal(self.address, CLUSTER, name="fleetlog demo log")
        self._closers.callback(self.journal.close)
        self.api = ApiClient(self.connection, CLUSTER)

    def close(self) -> None:
        """Let go of the connections. Repeatable."""
        self._closers.close()

    def lives(self) -> dict[str, VmState]:
        """Fold every life from the log."""
        states: dict[str, VmState] = {}
        for fact in self.journal.replay(aggregates="vm.>"):
            vm = fact.aggregate.removeprefix("vm.")
            states[vm] = evolve(states.get(vm), fact.event, fact)
        return states

    def until(
        self, what: str, holds: Callable[[dict[str, VmState]], bool], timeout_s: float
    ) -> dict[str, VmState]:
        """Look until it holds.

        Raises:
            TimeoutError: it did not, within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(LogUnavailable):
                states = self.lives()
                if holds(states):
                    return states
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s in vain: {what}")
            time.sleep(0.1)


class Demo:
    """One run in `directory`, which must be empty and ours."""

    def __init__(self, directory: Path, play: Play, tell: Tell) -> None:
        """Take the folder, what to play in it, and whom to tell.

        Raises:
            NotHere: this host or installation cannot play it.
        """
        self.stage = Stage(directory, play)
        self._jobs = play.jobs
        self._tell = tell
        self._eyes: Eyes | None = None
        self._began_s = time.monotonic()

    def run(self) -> Report:
        """Play the plot and report. The coordinator is stopped and the host is as before, whatever happens."""
        try:
            return self._run()
        finally:
            self._clean_up()

    def _run(self) -> Report:
        eyes = self._start("coordinator {pid} is up, with a NATS and a PostgreSQL of its own")
        cast = self._ask(eyes)
        eyes.until("four agents at work", lambda states: _count(states, "registered") >= 4, WORKING_S)  # noqa: PLR2004
        self._tell("kill -9 of the coordinator: nothing of it is left but the log")
        killed_at, killed_s = self._now(eyes), time.monotonic()
        eyes.close()
        self.stage.kill()
        eyes = self._start(
            "coordinator {pid} reads the log, looks at the host, and takes the living up again"
        )
        down_s = time.monotonic() - killed_s
        states = eyes.until(
            "the end of every life", lambda s: all(not each.live for each in s.values()), ENDING_S
        )
        self._tell("every life has come to its end; comparing log, tables and host")
        differences = self._verify(eyes)
        facts = tuple(eyes.journal.replay())
        fold_fleet(facts)
        eyes.close()
        self._eyes = None
        self.stage.stop()
        left = leaks(self.stage.directory, frozenset(states))
        return self._report(
            cast, states, facts=facts, differences=differences, left=left, killed_at=killed_at, down_s=down_s
        )

    def _start(self, saying: str) -> Eyes:
        runtime = self.stage.start()
        self._eyes = Eyes(runtime)
        self._tell(saying.format(pid=self.stage.pid))
        return self._eyes

    def _ask(self, eyes: Eyes) -> tuple[Cast, ...]:
        cast = []
        for job in self._jobs:
            request = DemandRequest(labels=("demo", job), job=f"demo-{job}", by="demo")
            (answer,) = eyes.api.demand_of(self.stage.coordinator, request).answers
            if answer.vm is None:
                raise RuntimeError(f"no agent for {job}: {answer.message}")
            cast.append(Cast(job=job, vm=answer.vm))
        self._tell(f"asked for six agents: {', '.join(each.job for each in cast)}")
        return tuple(cast)

    def _now(self, eyes: Eyes) -> datetime:
        return eyes.api.status(self.stage.coordinator).now

    def _verify(self, eyes: Eyes) -> tuple[str, ...]:
        dsn = eyes.runtime.postgres_dsn
        if dsn is None:
            return ("the coordinator has no tables",)
        found: list[Difference | Any] = list(eyes.api.verify_host(self.stage.coordinator).differences)
        database = Database(dsn, CLUSTER)
        try:
            rows = PostgresRows(database)
            _wait_until_level(eyes, rows)
            for view in VIEWS:
                found.extend(verify_tables(eyes.journal, rows, view))
        finally:
            database.close()
        return tuple(f"{each.kind} {each.where} {each.key}: {each.detail}" for each in found)

    def _report(
        self,
        cast: tuple[Cast, ...],
        states: dict[str, VmState],
        *,
        facts: tuple[Recorded, ...],
        differences: tuple[str, ...],
        left: tuple[str, ...],
        killed_at: datetime,
        down_s: float,
    ) -> Report:
        reaped = sum(not state.live for state in states.values())
        taken_up = sum(bool(state.taken_up) for state in states.values())
        waits = sorted(_demand_to_registered_ms(facts))
        ends = {state.job: (state.reason, state.exit_code) for state in states.values()}
        as_promised = all(
            (
                len(states) == len(cast) == reaped,
                taken_up > 0,
                not left,
                not differences,
                ends[f"demo-{BROKEN}"] == ("job-complete", BROKEN_CODE),
                ends[f"demo-{MUTE}"][0] == "register-timeout",
                all(
                    ends[f"demo-{job}"] == ("job-complete", 0)
                    for job in self._jobs
                    if job not in (BROKEN, MUTE)
                ),
            )
        )
        return Report(
            ok=as_promised,
            agents_requested=len(cast),
            agents_reaped=reaped,
            taken_up_again=taken_up,
            leaks=len(left),
            verify_clean=not differences,
            events=len(facts),
            demand_to_registered_ms_p50=round(median(waits), 1) if waits else None,
            coordinator_down_ms=round(down_s * 1000, 1),
            took_s=round(time.monotonic() - self._began_s, 2),
            lives=tuple(states[each.vm] for each in cast),
            jobs={each.vm: each.job for each in cast},
            facts=facts,
            killed_at=killed_at,
            left=left,
            differences=differences,
            directory=str(self.stage.directory),
        )

    def _clean_up(self) -> None:
        """End what an interrupted run left, stop the coordinator, and undo what its driver did to the host."""
        began = self.stage.data.exists()
        if self._eyes is not None:
            with contextlib.suppress(Exception):  # whatever is wrong, the rest must still be cleaned
                self._end_machines(self._eyes)
            self._eyes.close()
        self.stage.stop()
        if not began:
            return
        for scaler in load(self.stage.config).scalers:
            if isinstance(scaler, BareMetalScaler):
                self._undo(scaler)
        for process in belonging(self.stage.directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _undo(self, scaler: BareMetalScaler) -> None:
        """End what an interrupted run left of a scaler, and its cgroups."""
        state = self.stage.data / "machines"
        driver = BareMetalDriver(
            bare_metal_config(scaler, owner=self.stage.coordinator, state=state, environment={})
        )
        for resource in driver.survey():
            if resource.vm is not None and resource.owner == self.stage.coordinator:
                placement = driver.plan(resource.vm, scaler.name, scaler.label_sets[0].labels)
                driver.destroy(resource.vm, placement, None, threading.Event())
        with contextlib.suppress(OSError):
            driver.teardown_host()
        driver.close()

    def _end_machines(self, eyes: Eyes) -> None:
        live = [state.id for state in eyes.lives().values() if state.live]
        for vm in live:
            eyes.api.remove(self.stage.coordinator, RemoveRequest(agent=vm, force=True, by="demo"))
        eyes.until("the end of what was left", lambda s: all(not each.live for each in s.values()), 15)


def remove(directory: Path) -> None:
    """Remove the demonstration's folder."""
    shutil.rmtree(directory, ignore_errors=True)


def _wait_until_level(eyes: Eyes, rows: PostgresRows) -> None:
    """Let the projectors save the last facts: a row not saved yet is no difference."""
    end = eyes.journal.headroom().last_sequence
    deadline_s = time.monotonic() + LEVEL_S
    while any(rows.checkpoint(view) < end for view in VIEWS) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _count(states: dict[str, VmState], phase: str) -> int:
    return sum(state.phase == phase for state in states.values())


def _demand_to_registered_ms(facts: tuple[Recorded, ...]) -> Iterator[float]:
    asked: dict[str, datetime] = {}
    for fact in facts:
        if isinstance(fact.event, Requested):
            asked[fact.aggregate] = fact.at
        elif isinstance(fact.event, Registered):
            yield (fact.at - asked[fact.aggregate]).total_seconds() * 1000

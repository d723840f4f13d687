"""A coordinator as a user runs it: `fleetlog up` and commands as processes, real agents, and the truth about both."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sysconfig
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from events.envelope import Recorded
from events.vm import Reaped, Requested, Spawned, SpawnStarted
from infra.embedded.data_directory import DataDirectory
from infra.journal.address import NatsAddress
from infra.journal.nats import NatsJournal
from projections.vm import VmState, evolve
from tests.acceptance.host import cgroups_of, processes_of, remove_cgroup_level, wait_until

BINARIES = Path(sysconfig.get_path("scripts"))
LOG_LIMIT = "64m"
_numbers = itertools.count(1)

_AGENT = """#!/bin/sh
echo "$FLEETLOG_AGENT_ID" >> {here}/starts
exec {binaries}/fleetlog-agent --grace 1 -- /bin/sh -c '. {here}/job-{kind}'
"""
_AGENT_THAT_NEVER_COMES = """#!/bin/sh
echo "$FLEETLOG_AGENT_ID" >> {here}/starts
{rest}
"""
_JOBS = {
    "quick": "echo done with it",
    "held": "n=0; while [ ! -e {here}/gate ]; do n=$((n+1)); echo line $n; sleep 0.05; done; echo last line",
    # A job whose machine cannot be removed: by root because of a mount, by others because of a closed folder.
    "stubborn": 'mkdir closed; touch closed/file; if [ "$(id -u)" = 0 ]; then mount -t tmpfs none closed; '
    "else chmod 0 closed; fi; pwd >> {here}/closed",
}
_NOT_AGENTS = {"broken": "exit 3", "mute": "sleep 600"}
KINDS = (*_JOBS, *_NOT_AGENTS)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Servers that the coordinator does not run itself."""

    nats: str
    creds: Path
    signing_key: Path
    postgres: str
    tls_ca: Path | None = None


class EndedError(AssertionError):
    """A coordinator that should be up has ended."""


class Coordinator:
    """One process of `fleetlog up`."""

    def __init__(self, process: subprocess.Popen[bytes], data: Path, stdout: Path, stderr: Path) -> None:
        self.process = process
        self.stdout = stdout
        self.stderr = stderr
        self._data = data
        self._helpers: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self.process.pid

    def said(self) -> str:
        """Return what it wrote to stderr."""
        return self.stderr.read_text()

    def wait_up(self) -> Coordinator:
        """Wait until its front doors are open."""

        def is_up() -> bool:
            if self.process.poll() is not None:
                raise EndedError(f"ended with {self.process.returncode}:\n{self.said()}")
            runtime = DataDirectory.running(self._data)
            return runtime is not None and runtime.pid == self.pid

        wait_until(is_up, f"the coordinator is up: {self.said()}", 30)
        self._remember_helpers()
        return self

    def _remember_helpers(self) -> None:
        """Note its children: servers and helpers of its own, which must not be left behind."""
        with suppress(psutil.NoSuchProcess):
            agents = processes_of(self._data.parent / "agents")
            children = psutil.Process(self.pid).children()
            machines = ("jailer", "firecracker")
            self._helpers.update(
                child for child in children if child.pid not in agents and child.name() not in machines
            )

    def health(self) -> dict[str, Any]:
        """Return what `/health` says."""
        runtime = DataDirectory.running(self._data)
        assert runtime is not None
        try:
            with urllib.request.urlopen(f"http://{runtime.http_address}/health", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return found

    def wait_dead(self, timeout_s: float = 20.0) -> int:
        """Wait until it ended by itself; return its exit status, negative for a signal."""
        wait_until(lambda: self.process.poll() is not None, f"it ended; it said: {self.said()}", timeout_s)
        return self.process.wait()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._remember_helpers()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it in order, and require that it does."""
        self._remember_helpers()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.wait_dead(30)
        assert status == 0, f"ended with {status}:\n{self.said()}"
        wait_until(
            lambda: not any(helper.is_running() for helper in self._helpers),
            "the coordinator's own servers and helpers ended with it",
        )


class Place:
    """One data directory, one fleet file, and coordinators on it one after the other."""

    def __init__(self, root: Path, servers: Servers | None = None, **scaler: Any) -> None:
        self.root = root
        self.data = root / "data"
        self.agents = root / "agents"
        self.servers = servers
        number = next(_numbers)
        self.id = f"acc-{os.getpid()}-{number}"
        self.cluster = self.id if servers is not None else "default"
        self.config = root / "fleet.yaml"
        self.coordinators: list[Coordinator] = []
        self._runs = itertools.count(1)
        self.agents.mkdir(parents=True)
        self._write_agents()
        self.configure(**scaler)

    def _write_agents(self) -> None:
        for kind, job in _JOBS.items():
            (self.agents / f"job-{kind}").write_text(job.format(here=self.agents) + "\n")
            self._program(kind, _AGENT.format(here=self.agents, binaries=BINARIES, kind=kind))
        for kind, rest in _NOT_AGENTS.items():
            self._program(kind, _AGENT_THAT_NEVER_COMES.format(here=self.agents, rest=rest))

    def _program(self, kind: str, text: str) -> None:
        path = self.agents / kind
        path.write_text(text)
        path.chmod(0o755)

    def configure(self, **scaler: Any) -> None:
        """Write the fleet file: one scaler `metal` with a label set for every kind of agent."""
        settings = {
            "name": "metal",
            "backend": "bare-metal",
            "max_agents": 20,
            "beat_every_s": 1,
            "heartbeat_grace_s": 3,
            "stop_grace_s": 1,
            "label_sets": [
                {"labels": [kind], "binary_path": str(self.agents / kind), "env": {"PLACE": str(self.agents)}}
                for kind in KINDS
            ],
        } | scaler
        self.config.write_text(yaml.safe_dump({"version": 1, "scalers": [settings]}))

    # Coordinators and commands.

    def globals(self) -> list[str]:
        """Return the options every command needs to find this place."""
        options = ["--data-dir", str(self.data), "--cluster", self.cluster]
        if self.servers is not None:
            options += ["--nats", self.servers.nats, "--nats-creds", str(self.servers.creds)]
            options += ["--postgres", self.servers.postgres]
            if self.servers.tls_ca is not None:
                options += ["--tls-ca", str(self.servers.tls_ca)]
        return options

    def command(self, *arguments: str) -> list[str]:
        """Return the whole command line of a command for this place."""
        return [str(BINARIES / "fleetlog"), *self.globals(), *arguments]

    def launch(self, *options: str, crash_at: str | None = None, boot_id: str | None = None) -> Coordinator:
        """Start `fleetlog up` and return at once.

        With `crash_at` it kills itself at that point; with `boot_id` it sees the host under another boot (root only).
        """
        run = next(self._runs)
        stdout, stderr = self.root / f"up-{run}.out", self.root / f"up-{run}.err"
        arguments = ["--config", str(self.config), "--id", self.id, *options]
        if self.servers is not None:
            arguments += ["--agent-signing-key", str(self.servers.signing_key), "--log-limit", LOG_LIMIT]
        environment = {} if crash_at is None else {"FLEETLOG_CRASH_AT": crash_at}
        if self.servers is not None and self.servers.tls_ca is not None:
            environment["SSL_CERT_FILE"] = str(self.servers.tls_ca)  # which agents get too
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [*self._as_boot(boot_id), *self.command("up", *arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=_environment() | environment,
                start_new_session=True,
            )
        made = Coordinator(process, self.data, stdout, stderr)
        self.coordinators.append(made)
        return made

    def start(self, *options: str, crash_at: str | None = None, boot_id: str | None = None) -> Coordinator:
        """Start `fleetlog up` and wait until it is up."""
        return self.launch(*options, crash_at=crash_at, boot_id=boot_id).wait_up()

    def _as_boot(self, boot_id: str | None) -> list[str]:
        """Return the command before a command that lets it see another boot id."""
        if boot_id is None:
            return []
        shown = self.root / "boot-id"
        shown.write_text(f"{boot_id}\n")
        mount = f"mount --bind {shown} /proc/sys/kernel/random/boot_id"
        return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]

    def power_cut(self) -> None:
        """End every process of this place at once, servers included, and what only the kernel knew of them."""
        self.coordinators[-1].kill()
        for pid in processes_of(self.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(self.root), "everything is dead")
        for path in cgroups_of(self.id):
            Path(path).rmdir()

    def unclose_all(self) -> None:
        """Make what stubborn jobs closed removable again."""
        for folder in (self.agents / "closed").read_text().split():
            unclose(Path(folder) / "closed")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(),
            check=False,
            timeout=50,
        )

    def ask(self, *arguments: str, expect: int = 0) -> Any:
        """Run a command with --json, require its exit code, and return what it printed."""
        done = self.run("--json", *arguments)
        assert done.returncode == expect, (
            f"{arguments} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return json.loads(done.stdout or done.stderr)

    def demand(self, kind: str, *options: str) -> str:
        """Ask for one agent of this kind and return its id."""
        (answer,) = self.ask("demand", "--labels", kind, *options)["answers"]
        assert answer["kind"] in ("spawning", "existing"), answer
        vm: str = answer["vm"]
        return vm

    @contextmanager
    def asking(self, *arguments: str) -> Iterator[None]:
        """Run a command beside the block, and end it after the block: nobody may ever answer it."""
        said = self.root / "asked.err"
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                self.command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=_environment(),
            )
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}\n{arguments} said: {said.read_text()}") from None
        finally:
            process.kill()
            process.wait()

    # What there is.

    def address(self) -> NatsAddress:
        """Return where the log is."""
        if self.servers is not None:
            return NatsAddress(url=self.servers.nats, creds=self.servers.creds, ca=self.servers.tls_ca)
        runtime = DataDirectory.running(self.data)
        assert runtime is not None, "no coordinator runs, so neither does its NATS"
        assert runtime.nats_creds is not None
        return NatsAddress(url=runtime.nats_url, creds=Path(runtime.nats_creds))

    def facts(self) -> list[Recorded]:
        """Read the whole log, without any coordinator."""
        journal = NatsJournal(self.address(), self.cluster, name="acceptance test")
        try:
            return list(journal.replay())
        finally:
            journal.close()

    def lives(self) -> dict[str, VmState]:
        """Return every machine there ever was, folded from the log."""
        return fold(self.facts())

    def wait_for(
        self, done: Callable[[dict[str, VmState]], bool], what: str, timeout_s: float = 25.0
    ) -> None:
        """Wait until the log's machines are such."""
        last: dict[str, VmState] = {}

        def look() -> bool:
            nonlocal last
            last = self.lives()
            return done(last)

        try:
            wait_until(look, what, timeout_s)
        except AssertionError as error:
            phases = {vm: f"{state.phase} {state.reason or ''} {state.detail}" for vm, state in last.items()}
            said = self.coordinators[-1].said()
            raise AssertionError(f"{error}; there are {phases}; the coordinator said:\n{said}") from None

    def wait_phase(self, vm: str, phase: str, timeout_s: float = 25.0) -> None:
        """Wait until one machine is in this phase."""
        self.wait_for(lambda lives: vm in lives and lives[vm].phase == phase, f"{vm} is {phase}", timeout_s)

    def wait_all_reaped(self, timeout_s: float = 25.0) -> None:
        """Wait until no machine lives any more."""
        self.wait_for(
            lambda lives: bool(lives) and not any(state.live for state in lives.values()),
            "every machine is reaped",
            timeout_s,
        )

    def starts(self) -> Counter[str]:
        """Return how often each machine's program was started, by the program's own account."""
        path = self.agents / "starts"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def processes(self) -> dict[int, str]:
        """Return the agents' processes on the host."""
        return processes_of(self.agents)

    def open_gate(self) -> None:
        """Let the held jobs end."""
        (self.agents / "gate").touch()

    def verify(self) -> None:
        """Require that `fleetlog verify` finds nothing, apart from what other owners have on this host."""
        done = self.run("--json", "verify")
        found = json.loads(done.stdout)
        ours = [each for each in found["differences"] if _is_ours(each, self.id)]
        assert ours == []
        assert found["views"]
        assert [host["asked"] for host in found["hosts"]] == [True], found["hosts"]
        assert done.returncode == (1 if found["differences"] else 0)

    def assert_one_machine_per_request(self) -> None:
        """Require of the log and of the host: every request one machine, begun at most once, ended and gone."""
        facts = self.facts()
        for kind, most in ((Requested, 1), (SpawnStarted, 1), (Spawned, 1), (Reaped, 1)):
            counted = Counter(fact.aggregate for fact in facts if isinstance(fact.event, kind))
            assert all(times <= most for times in counted.values()), (kind, counted)
        lives = fold(facts)
        assert all(state.phase == "reaped" for state in lives.values()), lives
        starts = self.starts()
        assert set(starts) <= set(lives), "a machine the log does not know was started"
        assert all(times == 1 for times in starts.values()), f"started twice: {starts}"
        self.assert_no_agent_is_left()

    def assert_no_agent_is_left(self) -> None:
        """Look at the host itself."""
        wait_until(lambda: not self.processes(), f"no process of an agent is left: {self.processes()}", 5)
        assert cgroups_of(self.id) == []
        runs = self.data / "machines" / "runs"
        assert not runs.exists() or list(runs.iterdir()) == []

    def settle(self) -> None:
        """End the test: everything as the log says, everything stopped, nothing left."""
        self.verify()
        self.assert_one_machine_per_request()
        for coordinator in self.coordinators:
            if coordinator.process.poll() is None:
                coordinator.stop()
        left = processes_of(self.root)
        assert left == {}, left

    def clean(self) -> None:
        """Take away whatever a test that failed left behind."""
        for coordinator in self.coordinators:
            if coordinator.process.poll() is None:
                coordinator.process.kill()
                coordinator.process.wait()
        for pid in processes_of(self.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(self.root), "what was killed is gone")
        for folder in (self.data / "machines" / "runs").glob("*/work/closed"):
            unclose(folder)
        for path in cgroups_of(self.id):
            with suppress(OSError):
                Path(path).rmdir()
        with suppress(OSError):
            remove_cgroup_level(self.id)


def unclose(folder: Path) -> None:
    """Make what a stubborn job closed removable again."""
    if os.geteuid() == 0:
        subprocess.run(["umount", folder], check=False, stderr=subprocess.DEVNULL)
    folder.chmod(0o700)


def fold(facts: list[Recorded]) -> dict[str, VmState]:
    """Fold the machines of these facts."""
    lives: dict[str, VmState] = {}
    for fact in facts:
        if fact.aggregate.startswith("vm."):
            vm = fact.aggregate.removeprefix("vm.")
            state = evolve(lives.get(vm), fact.event, fact)
            assert state is not None
            lives[vm] = state
    return lives


def _environment() -> dict[str, str]:
    """Return our environment without anything that configures fleetlog."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FLEETLOG_")}


def _is_ours(difference: dict[str, str], owner: str) -> bool:
    foreign = difference["kind"] == "not-in-log" and difference["key"].startswith("cgroup ")
    return not foreign or difference["key"].startswith(f"cgroup {owner}/")

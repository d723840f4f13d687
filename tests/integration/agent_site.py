"""A place for real agents in tests: a door on a real NATS, before a front door that does as it is told."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from actors.commands import (
    AgentDone,
    Answer,
    Demand,
    FrontDoor,
    RegisterAgent,
    Registration,
    RemoveAgent,
    ScalerStatus,
    SetGate,
)
from actors.errors import Refused
from actors.ports import AgentAccess, AgentLink
from events import subjects
from infra.agent.access import NatsAgentAccess
from infra.agent.allowance import Rate
from infra.agent.door import AgentDoor
from infra.clock import SystemClock
from infra.journal.address import NatsAddress
from infra.journal.connection import Message, NatsConnection
from tests.conftest import NatsServer

AGENT = Path(sys.executable).parent / "fleetlog-agent"
BEAT_EVERY_S = 0.2


def eventually(holds: Callable[[], object], what: str, timeout_s: float = 15.0) -> None:
    """Wait until something holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


@dataclass
class ScriptedFrontDoor:
    """Knows the machines it is told of, lets each be registered by one session, and writes down what it is asked."""

    known: set[str] = field(default_factory=set)
    reaped: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    sessions: dict[str, str] = field(default_factory=dict)
    registers: list[RegisterAgent] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    beats: list[str] = field(default_factory=list)
    dones: list[AgentDone] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    hold: threading.Event | None = None
    beat_every_s: float = BEAT_EVERY_S

    def register(self, command: RegisterAgent) -> Registration | None:
        """Decide as the domain does, in memory."""
        self.registers.append(command)
        self._meet()
        vm = command.vm
        if vm in self.elsewhere:
            return None
        if vm in self.reaped:
            raise Refused("reaped", f"machine {vm} is gone")
        if vm not in self.known:
            raise Refused("unknown-agent", f"no machine {vm} was ever started")
        if self.sessions.setdefault(vm, command.session) != command.session:
            raise Refused("already-registered", f"machine {vm} has its agent")
        return Registration(
            vm=vm,
            labels=("linux", "kvm"),
            gate=("kvm",),
            job="job-7",
            run="run-9",
            beat_every_s=self.beat_every_s,
        )

    def config_acked(self, vm: str, session: str) -> None:
        """Note it."""
        assert self.sessions[vm] == session
        self.acked.append(vm)

    def beat(self, vm: str, session: str) -> bool:
        """Note it, and tell whether it is a live agent's."""
        self.beats.append(vm)
        return self.sessions.get(vm) == session and vm not in self.reaped

    def done(self, command: AgentDone) -> None:
        """Note it."""
        self._meet()
        if self.sessions.get(command.vm) != command.session:
            raise Refused("unknown-agent", f"machine {command.vm} has no such agent")
        self.dones.append(command)

    def _meet(self) -> None:
        if self.hold is not None:
            assert self.hold.wait(30)
        if self.failures:
            raise self.failures.pop(0)

    def demand(self, demand: Demand) -> tuple[Answer, ...]:
        """No agent can ask this."""
        raise AssertionError(demand)

    def remove(self, command: RemoveAgent) -> None:
        """No agent can ask this."""
        raise AssertionError(command)

    def set_gate(self, command: SetGate) -> None:
        """No agent can ask this."""
        raise AssertionError(command)

    def scalers(self) -> tuple[ScalerStatus, ...]:
        """No agent can ask this."""
        raise AssertionError

    def log_tail(self, vm: str, lines: int) -> tuple[str, ...]:
        """No agent can ask this."""
        raise AssertionError(vm, lines)


class Site:
    """One cluster's door on a server, and the agents started beside it."""

    def __init__(self, server: NatsServer, cluster: str, directory: Path) -> None:
        self.server = server
        self.cluster = cluster
        self.directory = directory
        self.clock = SystemClock()
        self.front = ScriptedFrontDoor()
        self.lines: list[tuple[str, str]] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self.connection = NatsConnection(
            NatsAddress(url=server.url, creds=server.creds_path), name="coordinator", timeout_s=5
        )
        self._beats: list[tuple[float, str]] = []
        # Heard beside the door, because the front door is told of log lines as signs of life too.
        self.connection.subscribe(subjects.all_agents(cluster, "beat"), self._note_beat)
        self.door = self.open_door()

    def open_door(self, *, ttl_s: float = 3600, rate: Rate | None = None) -> AgentDoor:
        """Open the door, as a coordinator does at its start; it remembers nothing of an earlier one."""
        front: FrontDoor = self.front
        access: AgentAccess = self.access(ttl_s=ttl_s)
        assert isinstance(access, NatsAgentAccess)
        door = AgentDoor(
            self.connection,
            self.cluster,
            front,
            access,
            self.clock,
            on_lines=self._take,
            rate=rate,
            threads=4,
            renew_again_after_s=min(10.0, ttl_s / 10),
        )
        self.link: AgentLink = door
        door.start()
        return door

    def reopen(self, *, ttl_s: float = 3600, rate: Rate | None = None) -> None:
        """Close the door and open another with other settings."""
        self.door.close()
        self.door = self.open_door(ttl_s=ttl_s, rate=rate)

    def access(self, *, ttl_s: float = 3600, bearer: bool = False) -> NatsAgentAccess:
        """Return what mints credentials of this server."""
        return NatsAgentAccess(
            cluster=self.cluster,
            nats_url=self.server.url,
            clock=self.clock,
            signer=self.server.agent_signer,
            ttl_s=ttl_s,
            bearer=bearer,
        )

    def environment(self, vm: str, *, ttl_s: float = 3600, bearer: bool = False) -> dict[str, str]:
        """Return what a driver hands to the agent of a machine."""
        return dict(self.access(ttl_s=ttl_s, bearer=bearer).environment(vm, ("linux", "kvm")))

    def start(
        self,
        vm: str,
        *command: str,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a real agent; what it says goes to `VM.out` and `VM.err`."""
        with (
            (self.directory / f"{vm}.out").open("ab") as out,
            (self.directory / f"{vm}.err").open("ab") as err,
        ):
            agent = subprocess.Popen(
                [AGENT, *options, "--", *command],
                env={"PATH": os.environ["PATH"]} | (environment or self.environment(vm)),
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )
        self.agents.append(agent)
        return agent

    def said(self, vm: str) -> str:
        """Return what the agent wrote to stderr."""
        return (self.directory / f"{vm}.err").read_text()

    def printed(self, vm: str) -> str:
        """Return what the agent wrote to stdout."""
        return (self.directory / f"{vm}.out").read_text()

    def beats_of(self, vm: str) -> list[float]:
        """Return when beats of the agent came, by our clock."""
        return [at_s for at_s, of in list(self._beats) if of == vm]

    def close(self) -> None:
        """End everything that was started."""
        for agent in self.agents:
            agent.terminate()  # it ends its job, which a SIGKILL would leave behind
        eventually(
            lambda: all(agent.poll() is not None or self._hurry(agent) for agent in self.agents), "agents end"
        )
        self.door.close()
        self.connection.close()

    def _hurry(self, agent: subprocess.Popen[bytes]) -> bool:
        # Its job is over, or over by force now: what is left is to report it, for which nobody waits here.
        try:
            return agent.wait(0.5) is not None
        except subprocess.TimeoutExpired:
            agent.terminate()
        try:
            return agent.wait(0.5) is not None
        except subprocess.TimeoutExpired:
            agent.kill()
            return agent.wait(5) is not None

    def _note_beat(self, message: Message) -> None:
        self._beats.append((time.monotonic(), message.subject.split(".")[3]))

    def _take(self, vm: str, lines: tuple[str, ...]) -> None:
        self.lines.extend((vm, line) for line in lines)

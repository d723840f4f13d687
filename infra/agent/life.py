"""One agent's life: register, take the configuration, run the command, beat all the while, report, leave."""

import asyncio
import contextlib
import logging
import os
import platform
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from infra.agent.bootstrap import Bootstrap
from infra.agent.job import Job, JobFailed
from infra.agent.output import LineBuffer
from infra.agent.protocol import (
    LINES_MAX,
    Accepted,
    Acked,
    Beat,
    Config,
    Declined,
    Done,
    FromAgent,
    FromCommand,
    Logs,
    Noted,
    Register,
    Stop,
    Verb,
)
from infra.agent.uplink import Unanswered, Uplink
from infra.tasks import end

_LOG = logging.getLogger("fleetlog.agent")
_ASK_AGAIN_S = 0.5
_CONFIG_WAIT_S = 5.0
_LOGS_EVERY_S = 0.25
_LOGS_BYTES_MAX = 32 * 1024  # as JSON at most six times that, which the door still takes
_LAST_LOGS_S = 3.0

REFUSED = 3
UNANSWERED = 4


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the agent tries what; none of it ends a job that runs."""

    register_s: float = 120.0
    answer_s: float = 5.0
    done_s: float = 300.0
    grace_s: float = 10.0  # between a signal to us, passed on to the job, and its end by force


class _NotIn(Exception):  # noqa: N818
    """The agent did not get in."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Life:
    """Runs once. `environment` is what the command gets, besides what we add about its job."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        patience: Patience | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._command = command
        self._environment = environment
        self._patience = patience or Patience()
        self._session = os.urandom(16).hex()
        self._uplink = Uplink(bootstrap, self._obey)
        self._lines = LineBuffer()
        self._registered = False
        self._acking = False
        self._config: Config | None = None
        self._config_came = asyncio.Event()
        self._beat_every_s = 10.0
        self._job: Job | None = None
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Live, and return the exit code: the command's, 128 + N after signal N, else 3, 4, 126 or 127."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self._spawn(self._uplink.run())
        try:
            code, detail = await self._work()
        except _NotIn as error:
            _LOG.error("%s", error)
            return error.exit_code
        else:
            if self._registered:
                await self._report(code, detail)
            return 128 + signal.SIGTERM if code is None else code if code >= 0 else 128 - code
        finally:
            await end(self._tasks)

    async def _work(self) -> tuple[int | None, str]:
        """Return the command's exit code (None: it never began) and what to say about it."""
        getting_in = asyncio.ensure_future(self._get_in())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({getting_in, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not getting_in.done():
                return None, self._stop_reason
            config = getting_in.result()
        finally:
            await end((getting_in, stopping))
        if self._stopping.is_set():
            return None, self._stop_reason
        self._spawn(self._ship_lines())
        try:
            code = await self._run_command(config)
        except JobFailed as error:
            _LOG.error("%s", error)
            return error.exit_code, str(error)
        return code, self._stop_reason

    async def _get_in(self) -> Config:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience.register_s
        why = "no answer yet"
        while loop.time() < deadline_s:
            if self._uplink.refusal is not None:
                raise _NotIn(REFUSED, f"not let in: {self._uplink.refusal}")
            try:
                wait_s = min(self._patience.answer_s, deadline_s - loop.time())
                answer = await self._uplink.request("register", self._introduction(), wait_s)
            except Unanswered as error:
                why = str(error)
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            match answer:
                case Accepted(beat_every_s=every_s):
                    self._beat_every_s = every_s
                    if not self._registered:
                        self._registered = True
                        self._spawn(self._beat())
                    if (config := await self._configuration()) is not None:
                        return config
                    why = "registered, but no configuration came"
                case Declined(code=code, message=message, retry_after_s=None):
                    raise _NotIn(REFUSED, f"registration refused ({code}): {message}")
                case Declined(message=message, retry_after_s=float(pause_s)):
                    why = message
                    await asyncio.sleep(min(pause_s, 60.0))
                case _:
                    why = f"a strange answer to a registration: {answer}"
                    await asyncio.sleep(_ASK_AGAIN_S)
        raise _NotIn(
            UNANSWERED,
            f"not registered within {self._patience.register_s:g} s: {why}; is a coordinator of cluster "
            f"{self._bootstrap.cluster} running, and is NATS at {self._bootstrap.nats_url} reachable from here?",
        )

    async def _configuration(self) -> Config | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._config_came.wait(), _CONFIG_WAIT_S)
        return self._config

    def _introduction(self) -> Register:
        return Register(
            session=self._session,
            agent_version=version("fleetlog")[:64],
            facts={
                "os": platform.system()[:256],
                "arch": platform.machine()[:256],
                "kernel": platform.release()[:256],
                "hostname": platform.node()[:256],
            },
            public_key=self._uplink.public_key,
            credential_ends_at=self._uplink.credential_ends_at,
        )

    async def _run_command(self, config: Config) -> int:
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[int] = loop.create_future()

        def ended(code: int) -> None:
            loop.call_soon_threadsafe(exited.set_result, code)

        environment = {
            **self._environment,
            "FLEETLOG_LABELS": ",".join(config.labels),
            "FLEETLOG_GATE": ",".join(config.gate),
            **({"FLEETLOG_JOB": config.job} if config.job is not None else {}),
            **({"FLEETLOG_RUN": config.run} if config.run is not None else {}),
        }
        self._job = Job(
            self._command,
            environment,
            self._lines,
            ended,
        )
        return await exited

    def _obey(self, command: FromCommand) -> None:
        match command:
            case Config():
                self._config = command
                self._beat_every_s = command.beat_every_s
                self._config_came.set()
                self._spawn(self._acknowledge())
            case Stop(reason=reason, grace_s=grace_s):
                self._end_job(signal.SIGTERM, f"stopped: {reason}", grace_s)
            case _:
                pass  # a renewal is the uplink's

    async def _acknowledge(self) -> None:
        if not self._acking:
            self._acking = True
            try:
                await self._ask("acked", Acked(session=self._session), self._patience.register_s)
            finally:
                self._acking = False

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set() and self._job is not None:
            _LOG.warning("%s again: the job is ended by force", number.name)
            self._job.signal(signal.SIGKILL)
        else:
            self._end_job(number, f"the agent was sent {number.name}", self._patience.grace_s)

    def _end_job(self, number: signal.Signals, reason: str, grace_s: float) -> None:
        if self._stopping.is_set():
            return  # told twice; the first grace counts
        self._stop_reason = reason
        self._stopping.set()
        _LOG.warning("%s; the job has %g s to end", reason, grace_s)
        if (job := self._job) is not None:
            job.signal(number)
            asyncio.get_running_loop().call_later(grace_s, job.signal, signal.SIGKILL)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._beat_every_s
            if await self._uplink.connected(self._beat_every_s):
                beat = Beat(
                    session=self._session,
                    public_key=self._uplink.public_key,
                    credential_ends_at=self._uplink.credential_ends_at,
                )
                await self._uplink.publish("beat", beat)
            await asyncio.sleep(max(0.05, due_s - loop.time()))

    async def _ship_lines(self) -> None:
        while True:
            await asyncio.sleep(_LOGS_EVERY_S)
            await self._ship_once()

    async def _ship_once(self) -> None:
        # One batch on its way at a time: what the network does not carry stays in the buffer, which is bounded.
        if not len(self._lines) or not await self._uplink.connected(1.0):
            return
        lines, dropped = self._lines.take(lines_max=LINES_MAX, bytes_max=_LOGS_BYTES_MAX)
        await self._uplink.publish("logs", Logs(session=self._session, lines=lines, dropped=dropped))
        await self._uplink.settle(5.0)

    async def _report(self, code: int | None, detail: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_LOGS_S):
                while len(self._lines):
                    await self._ship_once()
        done = Done(session=self._session, exit_code=code, detail=detail[:2048])
        if not await self._ask("done", done, self._patience.done_s):
            _LOG.error("the end of the job could not be reported; the coordinator finds out when we are gone")

    async def _ask(self, verb: Verb, message: FromAgent, patience_s: float) -> bool:
        """Ask until it is noted; False when it is refused, or not noted in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        while loop.time() < deadline_s:
            try:
                wait_s = min(self._patience.answer_s, deadline_s - loop.time())
                answer = await self._uplink.request(verb, message, wait_s)
            except Unanswered:
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            match answer:
                case Noted():
                    return True
                case Declined(code=code, message=words, retry_after_s=None):
                    _LOG.error("%s was refused (%s): %s", verb, code, words)
                    return False
                case Declined(retry_after_s=float(pause_s)):
                    await asyncio.sleep(min(pause_s, 60.0))
                case _:
                    await asyncio.sleep(_ASK_AGAIN_S)
        return False

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        async def guarded() -> None:
            try:
                await coroutine
            except Exception:  # noqa: BLE001 - logged with its trace
                _LOG.exception("a bug in fleetlog-agent; the job goes on")

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

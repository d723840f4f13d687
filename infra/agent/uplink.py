"""The agent's way to the coordinator: one NATS connection at a time, made again whenever it is lost, and renewed.

nats-py's own reconnecting is off. It ends for good when the server cuts an expired credential, so a loop of ours is
needed in any case, and one way of coming back is easier to trust than two. A renewed credential is a new connection
too, opened before the old one is closed.
"""

import asyncio
import base64
import contextlib
import logging
import secrets
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from events import subjects
from infra.agent.bootstrap import Bootstrap, token_end
from infra.agent.protocol import (
    FromAgent,
    FromCommand,
    FromCoordinator,
    Malformed,
    Renew,
    Verb,
    encode,
    read_answer,
    read_command,
)
from infra.credentials import CredentialError, read_claims, sign
from infra.tasks import end

_LOG = logging.getLogger("fleetlog.agent")
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 3.0
_CONNECT_TIMEOUT_S = 8.0
_LOOK_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
_REFUSALS_MAX = 3


class Unanswered(Exception):  # noqa: N818 - a state of the world, not an accident
    """No answer came: no server, nobody behind it, or it was lost. Ask again."""


class _Line:
    """One connection; `gone` is set when it is of no more use."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.gone = asyncio.Event()
        self.denied = False


class Uplink:
    """Keeps the agent connected while `run` runs. All methods belong to the event loop.

    `refusal` says, in the server's words, that it does not let us in, or not as the agent we say we are: it is set
    after a few refusals in a row, and cleared when the server changes its mind.
    """

    def __init__(self, bootstrap: Bootstrap, on_command: Callable[[FromCommand], None]) -> None:
        self._bootstrap = bootstrap
        self._on_command = on_command
        self._jwt = bootstrap.credential.jwt
        self._line: _Line | None = None
        self._connected = asyncio.Event()
        self._renewed = asyncio.Event()
        self._refused = asyncio.Event()
        self._refusals = 0
        self._trouble = "no answer yet"
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self.refusal: str | None = None

    @property
    def credential_ends_at(self) -> int | None:
        """The end of the newest credential, in seconds since 1970."""
        return token_end(self._jwt)

    @property
    def public_key(self) -> str:
        """The key we prove to have."""
        return self._bootstrap.credential.public_key

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        wait_s = _FIRST_WAIT_S
        try:
            while True:
                try:
                    self._replace(await self._open())
                except Exception as error:  # noqa: BLE001 - whatever it was, a job may be running: try on
                    self._note_refusal(error)
                    _LOG.debug("NATS at %s: %r", self._bootstrap.nats_url, error)
                    # Spread out: after a server's restart a whole fleet comes back.
                    await asyncio.sleep(wait_s * (0.5 + secrets.randbelow(1000) / 1000))
                    wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
                    continue
                wait_s = _FIRST_WAIT_S
                await self._while_good()
        finally:
            line, self._line = self._line, None
            if line is not None:
                await _close(line)
            for task in list(self._closing_tasks):
                await task

    async def connected(self, timeout_s: float) -> bool:
        """Wait until there is a connection; False when there is none in time, or the server refuses us."""
        await _first(timeout_s, self._connected.wait(), self._refused.wait())
        return self._connected.is_set()

    async def publish(self, verb: Verb, message: FromAgent) -> bool:
        """Send, if there is a connection; False when there is none."""
        line = self._live()
        if line is None:
            return False
        try:
            await line.client.publish(self._subject(verb), encode(message))
        except (NatsError, OSError):
            return False
        return True

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the server has taken all that was sent; False when it did not in time."""
        line = self._live()
        if line is None:
            return False
        try:
            await line.client.flush(timeout=max(1, int(timeout_s)))
        except (NatsError, OSError, ValueError):
            return False
        return True

    async def request(self, verb: Verb, message: FromAgent, timeout_s: float) -> FromCoordinator:
        """Ask once and return the answer.

        Raises:
            Unanswered: none came in time, or the connection was lost meanwhile.
        """
        if not await self.connected(timeout_s):
            raise Unanswered(
                self.refusal or f"NATS at {self._bootstrap.nats_url} cannot be reached ({self._trouble})"
            )
        line = self._live()
        if line is None:
            raise Unanswered("the connection was lost")
        asking = line.client.request(self._subject(verb), encode(message), timeout=timeout_s)
        try:
            answer = await _first(timeout_s + 1, asking, line.gone.wait(), self._refused.wait())
            if not isinstance(answer, Msg):
                raise Unanswered(self.refusal or "the connection was lost before the answer came")
            return read_answer(answer.data)
        except (NatsError, OSError) as error:
            # No responders, or a timeout: a coordinator may be restarting.
            raise Unanswered(self.refusal or "NATS answers, but no coordinator does") from error
        except Malformed as error:
            raise Unanswered(f"the answer cannot be read: {error}") from error

    def _subject(self, verb: Verb) -> str:
        return subjects.agent(self._bootstrap.cluster, self._bootstrap.id, verb)

    def _live(self) -> _Line | None:
        line = self._line
        return None if line is None or line.gone.is_set() or not line.client.is_connected else line

    async def _while_good(self) -> None:
        line = self._line
        assert line is not None
        while not self._renewed.is_set() and not line.gone.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(line.gone.wait(), _LOOK_S)
            if line.client.is_closed:  # its callback waits for a peer that may never take our last bytes
                line.gone.set()
        if self._renewed.is_set():
            self._renewed.clear()
        else:
            self._connected.clear()
            why = line.client.last_error or "the server hung up"
            _LOG.warning("the connection to NATS was lost (%s); trying to come back", why)

    def _replace(self, line: _Line) -> None:
        old, self._line = self._line, line
        self._refusals = 0
        if not line.denied:
            self.refusal = None
            self._refused.clear()
        self._connected.set()
        if old is not None:
            task = asyncio.ensure_future(_close(old))
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)

    async def _open(self) -> _Line:
        bootstrap = self._bootstrap
        line = _Line(Client())

        async def failed(error: Exception) -> None:
            self._trouble = str(error) or type(error).__name__
            if "permissions violation" in str(error).lower():
                line.denied = True
                self._refuse(
                    f"NATS does not let this credential speak as agent {bootstrap.id} of cluster "
                    f"{bootstrap.cluster} ({error}): it belongs to another"
                )

        async def closed() -> None:
            line.gone.set()

        tls = ssl.create_default_context() if bootstrap.nats_url.startswith("tls://") else None

        def prove(nonce: str) -> bytes:
            # Asked for after TLS has begun, if it has, and before anything of ours is sent.
            if tls is not None and not line.client._server_info.get("tls_required"):  # noqa: SLF001 - no public way
                raise ConnectionError("the server speaks no TLS and the address is tls://")
            seed = bootstrap.credential.seed
            return base64.b64encode(sign(seed, nonce.encode())) if seed else b""

        options: dict[str, Any] = {
            "servers": bootstrap.nats_url,
            "name": f"fleetlog-agent {bootstrap.id}",
            "inbox_prefix": subjects.agent_inbox(bootstrap.id),
            "user_jwt_cb": self._jwt.encode,
            "signature_cb": prove,
            "error_cb": failed,
            "closed_cb": closed,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.05,
            "connect_timeout": 3,
            "ping_interval": 5,
            "max_outstanding_pings": 2,
            "tls": tls,
            "pending_size": 1024 * 1024,
            "flush_timeout": 2,
        }
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await line.client.connect(**options)
                command = subjects.agent_command(bootstrap.cluster, bootstrap.id)
                await line.client.subscribe(command, cb=self._hear)
                # Answered only after the subscription was: no command is missed from here on.
                await line.client.flush(timeout=3)
        except BaseException:
            await _close(line)
            raise
        return line

    async def _hear(self, message: Msg) -> None:
        try:
            command = read_command(message.data)
        except Malformed as error:
            _LOG.warning("a command cannot be read and is left out: %s", error)
            return
        if isinstance(command, Renew):
            self._take_up(command.jwt)
        else:
            self._on_command(command)

    def _take_up(self, jwt: str) -> None:
        try:
            for_us = read_claims(jwt)["sub"] == self.public_key
        except CredentialError:
            for_us = False
        if not for_us:
            _LOG.warning("a new credential is not for our key and is left out")
        elif (token_end(jwt) or 0) > (self.credential_ends_at or 0):
            self._jwt = jwt
            self._renewed.set()

    def _note_refusal(self, error: Exception) -> None:
        words = str(error)
        if "authorization" not in words.lower() and "authentication" not in words.lower():
            self._refusals = 0
            return
        self._refusals += 1
        if self._refusals >= _REFUSALS_MAX:
            self._refuse(
                f"NATS refuses the credential ({words}): it has ended, or is not of this server's account"
            )

    def _refuse(self, why: str) -> None:
        self.refusal = why
        self._refused.set()


async def _first(timeout_s: float, *waits: Coroutine[Any, Any, object]) -> object:
    """Return (or raise) what the first of several waits ends with, None when none does in time; end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
        return next((task.result() for task in tasks if task.done()), None)
    finally:
        await end(tasks)


async def _close(line: _Line) -> None:
    line.gone.set()
    with contextlib.suppress(Exception):  # whatever ails a connection that is not wanted any more
        await asyncio.wait_for(line.client.close(), _CLOSE_TIMEOUT_S)

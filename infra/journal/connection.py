"""NATS for everything but the log itself: agents, API, presence and the CLI, as blocking calls from any thread.

nats-py runs on one event loop in one daemon thread; nobody else touches it. A client that nats-py gives up on
(it does so for good when the server cuts an expired credential) is replaced, with all its subscriptions.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from actors.errors import LogUnavailable
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.journal.client import (
    RECONNECT_WAIT_S,
    client_options,
    close_leaked_socket,
    discard,
    refuse_plain_text,
)
from infra.journal.delivery import Delivery
from infra.journal.wire import Wire, WireLost, words
from infra.tasks import end

T = TypeVar("T")
_log = logging.getLogger("fleetlog.nats")
_REVIVE_WAIT_MAX_S = 5.0
_QUEUE_LIMIT = 10_000
_NEVER_DROPPED = 1 << 40  # nats-py's own limits are off: ours count, say so, and are per subscription


class NobodyAnswers(LogUnavailable):
    """A request found nobody who serves it, or no answer came in time."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message that came. `reply` is where an answer is expected, empty when none is."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: dict[str, str] = {}


class Subscription:
    """A running subscription; `dropped` counts messages its callback was too slow for."""

    def __init__(
        self,
        connection: "NatsConnection",
        subject: str,
        queue: str,
        callback: Callable[[Message], object],
        limit: int,
    ) -> None:
        self.subject = subject
        self.queue = queue
        self.inner: ClientSubscription | None = None  # of the present client; touched on the loop only
        self.delivery = Delivery(f"subscription {subject}", limit=limit)
        self._callback = callback
        self._connection = connection

    @property
    def dropped(self) -> int:
        """How many messages were dropped because the callback was too slow."""
        return self.delivery.dropped

    def stop(self) -> None:
        """End it; no further call is made. Repeatable."""
        self._connection.unsubscribe(self)

    async def attach(self, client: Client) -> None:
        """Subscribe with this client, on its loop."""
        self.inner = await client.subscribe(
            self.subject,
            queue=self.queue,
            cb=self._arrived,
            pending_msgs_limit=_NEVER_DROPPED,
            pending_bytes_limit=_NEVER_DROPPED,
        )

    async def _arrived(self, message: Msg) -> None:
        known = Message(
            subject=message.subject,
            payload=bytes(message.data),
            reply=message.reply,
            headers=dict(message.headers or {}),
        )
        self.delivery.put(lambda: self._callback(known))


class NatsConnection:
    """Connected to NATS, and kept so: whatever happens to the server, it is back as soon as the server is.

    Thread-safe; every call blocks, within a time. A silent server is given up after two to three
    `ping_interval_s`. `inbox_prefix` is where answers come, for a user who may listen nowhere else.

    Raises:
        LogUnavailable: no server answers within `timeout_s`.
        ConnectionRefusedByServer: credentials or TLS are wrong.
    """

    def __init__(
        self,
        address: NatsAddress,
        *,
        name: str,
        timeout_s: float = 5.0,
        ping_interval_s: float = 5.0,
        inbox_prefix: str = "_INBOX",
    ) -> None:
        self.address = address
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._timeout_s = timeout_s
        self._ping_interval_s = ping_interval_s
        # Refusals are told apart here: nats-py would try again for ever and report them to a callback only.
        try:
            with Wire(address, name=f"{name} (probe)", timeout_s=timeout_s, inbox_prefix=inbox_prefix):
                pass
        except WireLost as error:
            raise LogUnavailable(f"{error}; start NATS, or name the right server with --nats") from error
        self._client: Client | None = None
        self._subscriptions: set[Subscription] = set()
        self._watchers: list[Callable[[bool], None]] = []
        self._connected = False
        self._closing = False
        self._lock = threading.Lock()
        self._states = Delivery("connection state", limit=1000)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"nats {name}", daemon=True)
        self._thread.start()
        self._keeper: asyncio.Task[None] | None = None
        try:
            self.run(self._start(), timeout_s + 1)
        except BaseException:
            self.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether the server is reachable at this moment, as far as known."""
        return self._connected

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and return its result; for this package's own code and tests.

        Raises:
            LogUnavailable: it did not end in time (it is cancelled), or the connection is closed.
        """
        assert threading.current_thread() is not self._thread, (
            "a blocking call on the event loop never returns"
        )
        if self._closing and not self._loop.is_running():
            coroutine.close()
            raise LogUnavailable(f"the connection to NATS at {self.address} is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            future.cancel()
            raise LogUnavailable(
                f"NATS at {self.address} did not answer within {timeout_s:g} s; check that it runs"
            ) from error
        except (NatsError, OSError) as error:
            raise LogUnavailable(f"NATS at {self.address}: {words(error)}") from error

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message, at most once: nothing is kept for later when the server is away.

        Raises:
            LogUnavailable: not connected at the moment.
        """

        async def publish() -> None:
            await self._live().publish(
                subject, payload, reply=reply, headers=dict(headers) if headers else None
            )

        self.run(publish(), self._timeout_s)

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask and return the answer.

        Raises:
            NobodyAnswers: nobody serves the subject, or not within `timeout_s`.
            LogUnavailable: not connected at the moment.
        """

        async def request() -> bytes:
            try:
                answer = await self._live().request(subject, payload, timeout=timeout_s)
            except NoRespondersError as error:
                raise NobodyAnswers(f"nobody serves {subject} on NATS at {self.address}") from error
            except NatsTimeout as error:
                raise NobodyAnswers(f"no answer on {subject} within {timeout_s:g} s") from error
            return bytes(answer.data)

        return self.run(request(), timeout_s + 1)

    def subscribe(
        self,
        subject: str,
        callback: Callable[[Message], object],
        *,
        queue: str = "",
        limit: int = _QUEUE_LIMIT,
    ) -> Subscription:
        """Call `callback` with each message, in order, in a thread of this subscription alone.

        It may block and may use this connection. What it raises is logged and ends nothing. More than `limit`
        messages waiting for it: the newest are dropped and counted. With `queue`, each message goes to one
        member of that queue. Returns when the server has taken the subscription. Messages of the time without
        connection are lost, as always with core NATS.

        Raises:
            LogUnavailable: not connected at the moment.
        """
        subscription = Subscription(self, subject, queue, callback, limit)

        async def subscribe() -> None:
            client = self._live()
            await subscription.attach(client)
            self._subscriptions.add(subscription)
            await client.flush(timeout=max(1, int(self._timeout_s)))

        try:
            self.run(subscribe(), self._timeout_s)
        except BaseException:
            subscription.delivery.close()
            raise
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; `Subscription.stop` is the usual way."""

        async def unsubscribe() -> None:
            self._subscriptions.discard(subscription)
            if subscription.inner is not None:
                inner, subscription.inner = subscription.inner, None
                with contextlib.suppress(NatsError):
                    await inner.unsubscribe()

        with contextlib.suppress(LogUnavailable):
            self.run(unsubscribe(), self._timeout_s)
        subscription.delivery.close()

    def on_state(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` with whether we are connected: now, and at every change, from one thread, in order."""
        with self._lock:
            self._watchers.append(callback)
            connected = self._connected
            self._states.put(lambda: callback(connected))

    def close(self) -> None:
        """Let go of everything, within a few seconds. Repeatable."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(LogUnavailable):
            self.run(self._stop(), self._timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
        for subscription in list(self._subscriptions):
            subscription.delivery.close()
        self._states.close()

    # On the loop from here on.

    async def _start(self) -> None:
        self._closings: set[asyncio.Task[None]] = set()
        self._dead = asyncio.Event()
        self._client = await self._connect_client()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _stop(self) -> None:
        if self._keeper is not None:
            await end([self._keeper])
        if self._client is not None:
            await discard(self._client)
        await end(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
        await asyncio.get_running_loop().shutdown_default_executor()

    def _live(self) -> Client:
        client = self._client
        if client is None or not client.is_connected:
            raise LogUnavailable(
                f"not connected to NATS at {self.address} at the moment; it is tried on and on"
            )
        return client

    async def _connect_client(self) -> Client:
        client = Client()
        address = self.address

        async def failed(error: Exception) -> None:
            close_leaked_socket(client)
            if "ermissions" in str(error):
                _log.error("NATS at %s refuses: %s; the user needs that right", address, error)
            else:
                _log.debug("NATS at %s: %s", address, words(error))

        async def lost() -> None:
            if client is self._client:
                self._tell(connected=False)

        async def back() -> None:
            try:
                refuse_plain_text(client, address)
            except ConnectionRefusedByServer:
                self._closings.add(asyncio.get_running_loop().create_task(client.close()))
                return
            self._tell(connected=True)
            _log.info("connected to NATS at %s again", address)

        async def closed() -> None:
            if client is self._client:
                self._tell(connected=False)
                self._dead.set()

        options = client_options(address, self._name, self._inbox_prefix, self._ping_interval_s)
        options |= {"error_cb": failed, "disconnected_cb": lost, "reconnected_cb": back, "closed_cb": closed}
        try:
            await asyncio.wait_for(client.connect(**options), self._timeout_s)
            refuse_plain_text(client, address)
        except BaseException:
            await discard(client)
            raise
        self._tell(connected=True)
        return client

    async def _keep(self) -> None:
        """Replace a client that nats-py closed for good."""
        while True:
            await self._dead.wait()
            self._dead.clear()
            wait_s = RECONNECT_WAIT_S
            while True:
                try:
                    client = await self._connect_client()
                    for subscription in list(self._subscriptions):
                        if subscription in self._subscriptions:  # not stopped meanwhile
                            await subscription.attach(client)
                except (LogUnavailable, ConnectionRefusedByServer, NatsError, OSError, TimeoutError) as error:
                    _log.warning("NATS at %s: %s; trying on", self.address, words(error))
                    await asyncio.sleep(wait_s)
                    wait_s = min(wait_s * 2, _REVIVE_WAIT_MAX_S)
                else:
                    self._client = client
                    if client.is_closed:  # again, before anybody could notice
                        self._dead.set()
                    break

    def _tell(self, *, connected: bool) -> None:
        with self._lock:
            if connected == self._connected:
                return
            self._connected = connected
            for watcher in self._watchers:
                self._states.put(lambda watcher=watcher: watcher(connected))  # type: ignore[misc]

"""An HTTP server in a thread of its own: bounded in connections, in patience, and in how long it takes to stop."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from infra.http.address import AddressRefused, bound, listen, parse
from infra.http.health import Health
from infra.http.pages import application

__all__ = ["AddressRefused", "HttpServer"]

_log = logging.getLogger("fleetlog.http")

CONNECTIONS_MAX = 64
"""At one connection fewer the server still answers; at this many it answers 503."""

START_S = 10.0
GRACE_S = 1.0
"""How long answers under way may take when the server stops; then their connections are cut."""


class HttpServer:
    """Serves `/health`, `/metrics` and `routes` on one address until stopped. Started once.

    `health` and the registry's collectors are called on the server's loop and must not block.
    """

    def __init__(
        self,
        address: str,
        health: Callable[[], Health],
        registry: CollectorRegistry,
        *,
        routes: Sequence[BaseRoute] = (),
        patience_s: float = 10.0,
    ) -> None:
        """Take the address, `IP:PORT`, where port 0 takes a free one.

        `patience_s` is how long a connection may stand still (no whole request, or an answer nobody reads) before
        it is cut, which takes up to twice as long.
        """
        self._address = address
        config = uvicorn.Config(
            application(health, registry, routes=routes),
            http=_protocol(patience_s),
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=int(GRACE_S) + 1,
        )
        self._server = _Server(config)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> str:
        """Listen, and return the address with the port it got, as soon as requests are answered.

        Raises:
            AddressRefused: it cannot listen there; the message has the way out.
        """
        self._listener = listen(self._address)
        address = bound(self._listener)
        ip, _ = parse(address)
        if not ip.is_loopback:
            _log.warning(
                "%s is open to other hosts without authentication: let a firewall decide who may read it",
                address,
            )
        self._thread.start()
        if not self._server.ready.wait(START_S) or not self._server.started:
            self.stop()
            raise AddressRefused(f"the HTTP server on {address} did not come up; the log has the error")
        return address

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop: requests under way get a second, then connections are cut. Return whether all ended in time. Repeatable."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended and self._listener is not None:
            self._listener.close()
        return ended

    def _run(self) -> None:
        assert self._listener is not None
        try:
            self._server.run(sockets=[self._listener])
        except Exception:  # noqa: BLE001 - the fleet goes on without its pages
            _log.exception(
                "the HTTP server on %s ended; /health and /metrics are gone until a restart", self._address
            )
        finally:
            self._server.ready.set()


class _Server(uvicorn.Server):
    """Says when it is ready, and cuts what outlasts the grace of a stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and let what is under way finish within the grace."""
        cut = asyncio.get_running_loop().call_later(GRACE_S, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            self._cut()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if isinstance(transport, asyncio.Transport):
                transport.abort()


def _protocol(patience_s: float) -> type[H11Protocol]:
    """Return the protocol whose connections are cut when they stand still for `patience_s`."""

    class Patient(H11Protocol):
        """One connection."""

        _seen: tuple[object, ...] = ()
        _look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._look = self.loop.call_later(patience_s, self._check)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._look is not None:
                self._look.cancel()

        def _check(self) -> None:
            """Cut it if nothing moved since the last look, unless an answer is being made and read."""
            cycle: RequestResponseCycle | None = self.cycle  # None until the first request
            answering = cycle is not None and not cycle.response_complete
            unread_bytes = self.transport.get_write_buffer_size()
            now = (cycle, answering, unread_bytes)
            if now == self._seen and (not answering or unread_bytes):
                self.transport.abort()
                return
            self._seen = now
            self._look = self.loop.call_later(patience_s, self._check)

    return Patient

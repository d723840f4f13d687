"""What tests of the log and of connections share: waiting with a deadline, addresses, and a proxy that loses things."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from infra.journal.address import NatsAddress
from tests.conftest import NatsServer


def eventually(holds: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Wait until something holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def address_of(server: NatsServer) -> NatsAddress:
    """Return the address with the coordinator's credentials."""
    return NatsAddress(url=server.url, creds=server.creds_path)


@dataclass
class Proxy:
    """A TCP proxy before a NATS server. `swallow` loses what the server says from then on; `cut` ends all connections."""

    target_port: int
    swallowing: threading.Event = field(default_factory=threading.Event)
    swallowed_bytes: int = 0
    refused: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._deaf: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow_until_reconnect(self) -> None:
        """Lose what the server says to the present connections; new ones are well."""
        with self._lock:
            self._deaf += self._open

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        with self._lock:
            closing, self._open = self._open, []
        for one in closing:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refused.is_set():
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._copy, args=(client, server), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, client), daemon=True).start()

    def _copy(
        self, source: socket.socket, target: socket.socket, client: socket.socket | None = None
    ) -> None:
        """Pass on what comes; `client` is given when it comes from the server."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if client is not None and (self.swallowing.is_set() or client in self._deaf):
                    self.swallowed_bytes += len(data)
                    continue
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_before(server: NatsServer) -> Iterator[Proxy]:
    """Run a proxy before the server."""
    proxy = Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()

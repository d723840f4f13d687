"""NATS and PostgreSQL for one coordinator: those it was told of, or its own."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from actors.errors import LogUnavailable
from actors.ports import Clock
from infra.credentials import AccountSigner, CredentialError
from infra.embedded.data_directory import DataDirectory
from infra.embedded.errors import ServerFailed
from infra.embedded.files import write_private
from infra.embedded.nats_server import Durability, EmbeddedNats, NatsOptions
from infra.embedded.postgres_server import EmbeddedPostgres
from infra.embedded.server_process import ServerProcess
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.journal.wire import Wire, WireLost

logger = logging.getLogger("fleetlog.servers")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the servers are. `nats` None: an embedded one; `postgres` None: an embedded one, `none`: no tables."""

    nats: NatsAddress | None = None
    agent_signing_key: Path | None = None
    postgres: str | None = None
    nats_port: int | None = None
    durability: Durability = field(default_factory=Durability)


NO_TABLES = "none"


class Servers:
    """Starts what is embedded, in `start`, and stops it in `close`. Servers that were told of are left alone.

    Raises:
        ServerFailed: an embedded server does not start.
        ConnectionRefusedByServer: the signing key or creds cannot be read.
    """

    def __init__(self, options: ServerOptions, data: DataDirectory, clock: Clock) -> None:
        self.options = options
        self.embedded: dict[str, ServerProcess] = {}
        self._data = data
        self._clock = clock
        self._nats: EmbeddedNats | None = None
        self.address: NatsAddress
        self.signer: AccountSigner | None
        self.operator_creds: Path | None = None
        self.dsn: str | None = None

    def start(self, guard: Callable[[int], bool] = lambda _: False) -> None:
        """Start NATS, then PostgreSQL. A PostgreSQL that does not start is no reason not to run: the log is the truth.

        `guard` is told the embedded NATS's port before it listens, and says whether it may listen beyond loopback:
        whether nothing but loopback and our own guests can reach that port.
        """
        if self.options.nats is None:
            self._start_nats(guard)
        else:
            self.address = self.options.nats
            self.operator_creds = self.options.nats.creds
            self.signer = self._external_signer(self.options.nats)
        if self.options.postgres == NO_TABLES:
            return
        if self.options.postgres is not None:
            self.dsn = self.options.postgres
            return
        postgres = EmbeddedPostgres(self._data.path / "postgres", data_directory=self._data.path)
        try:
            postgres.start()
        except ServerFailed as error:
            logger.error("no tables: %s", error)  # noqa: TRY400 - the message has it all
        else:
            self.embedded["postgres"] = postgres
            self.dsn = postgres.dsn

    def _start_nats(self, guard: Callable[[int], bool]) -> None:
        options = NatsOptions(port=self.options.nats_port, durability=self.options.durability)
        nats = self._embedded_nats(options)
        if guard(nats.port):
            nats = self._embedded_nats(replace(options, host="0.0.0.0"))  # noqa: S104 - guarded, as was just said
        nats.start()
        self.embedded["nats"] = nats
        self.address = NatsAddress(url=nats.url, creds=nats.coordinator_creds)
        self.operator_creds = nats.operator_creds
        self.signer = nats.keys.agent_signer

    def _embedded_nats(self, options: NatsOptions) -> EmbeddedNats:
        return EmbeddedNats(self._data.path / "nats", issued_at=self._clock.now(), options=options)

    def _external_signer(self, address: NatsAddress) -> AccountSigner | None:
        path = self.options.agent_signing_key
        if path is None:
            return None
        try:
            seed = path.read_text(encoding="ascii").strip()
            creds = address.creds.read_text(encoding="ascii") if address.creds is not None else ""
            signer = AccountSigner.for_account_of(seed, creds)
        except (OSError, UnicodeDecodeError, CredentialError) as error:
            raise ConnectionRefusedByServer(
                f"--agent-signing-key {path}: {error}; name a file with the seed of a signing key (SA...) of the "
                "account that --nats-creds belongs to"
            ) from error
        self._probe(signer, address, path)
        return signer

    def _probe(self, signer: AccountSigner, address: NatsAddress, path: Path) -> None:
        """Connect once as an agent would: a key the server does not know would fail every agent, far from here."""
        try:
            with Wire(
                address, name="fleetlog start-up probe"
            ):  # first our own creds, which may be the wrong ones
                pass
        except WireLost as error:
            raise LogUnavailable(f"{error}; start NATS, or name the right server with --nats") from error
        now = self._clock.now()
        made = signer.mint(
            name="fleetlog start-up probe",
            issued_at=now,
            expires_at=now + timedelta(minutes=1),
            publish=[],
            subscribe=[],
        )
        creds = self._data.path / "probe.creds"
        write_private(creds, made.creds_text())
        try:
            with Wire(replace(address, creds=creds), name="fleetlog signing key probe"):
                pass
        except ConnectionRefusedByServer as error:
            raise ConnectionRefusedByServer(
                f"--agent-signing-key {path}: NATS at {address} refuses agents signed with it; name the seed of a "
                "signing key (SA...) that the account's JWT on that server lists"
            ) from error
        finally:
            creds.unlink(missing_ok=True)

    @property
    def durability(self) -> str:
        """Say what an acknowledged fact survives."""
        if self._is_external:
            return "as the NATS server at hand is configured: sync_interval always survives a power cut"
        return self.options.durability.statement

    @property
    def _is_external(self) -> bool:
        return self.options.nats is not None

    def close(self) -> None:
        """Stop what was started here, PostgreSQL first. Repeatable."""
        for name in ("postgres", "nats"):
            server = self.embedded.pop(name, None)
            if server is not None:
                with contextlib.suppress(ServerFailed):
                    server.stop()

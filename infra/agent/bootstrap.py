"""What an agent is told at its birth: who it is, where NATS is, and the secret that proves it."""

import contextlib
import ctypes
import os
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from events import subjects
from infra.agent import access
from infra.credentials import Credential, CredentialError, parse_creds, read_claims

_CREDENTIAL_BYTES_MAX = 64 * 1024
_PR_SET_DUMPABLE = 4
_ENV_START, _ENV_END = 47, 48  # fields of /proc/self/stat, counted after the name


class BootstrapError(Exception):
    """The agent was not told enough to begin; the message names the variable or option and what it must be."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Who the agent is and how it gets in. `labels` is what its machine was started for; the secret is not shown."""

    id: str
    cluster: str
    nats_url: str
    labels: tuple[str, ...]
    credential: Credential = field(repr=False)

    @property
    def credential_ends_at(self) -> int | None:
        """The end of the credential in seconds since 1970, None when it does not end."""
        return token_end(self.credential.jwt)


def token_end(jwt: str) -> int | None:
    """Return when a token ends, in seconds since 1970; None when never."""
    end = read_claims(jwt).get("exp")
    return int(end) if isinstance(end, int | float) else None


def ends_text(ends_at: int | None) -> str:
    """Say when a credential ends, for people."""
    if ends_at is None:
        return "never"
    return datetime.fromtimestamp(ends_at).astimezone().isoformat(timespec="seconds")


def read_bootstrap(
    environment: Mapping[str, str],
    *,
    agent_id: str | None = None,
    cluster: str | None = None,
    nats_url: str | None = None,
    credential_file: Path | None = None,
) -> Bootstrap:
    """Return what the options say, else what the environment says.

    Raises:
        BootstrapError: something is missing or malformed.
    """

    def told(option: str | None, variable: str, flag: str, what: str) -> str:
        value = option or environment.get(variable, "")
        if not value:
            raise BootstrapError(
                f"{what} is not known: give {flag}, or set {variable} (fleetlog sets it for its machines)"
            )
        return value

    vm = told(agent_id, access.ID, "--id", "the agent's id")
    if not subjects.VM_ID.fullmatch(vm):
        raise BootstrapError(f"agent id {vm!r}: at most 64 lowercase letters, digits and dashes expected")
    named = told(cluster, access.CLUSTER, "--cluster", "the cluster")
    if not subjects.NAME.fullmatch(named):
        raise BootstrapError(f"cluster {named!r}: at most 63 lowercase letters, digits and dashes expected")
    url = told(nats_url, access.NATS_URL, "--nats", "the NATS address")
    if not url.startswith(("nats://", "tls://")):
        raise BootstrapError(f"NATS address {url!r}: nats://HOST:PORT or tls://HOST:PORT expected")
    if credential_file is not None:
        text = _read_file(credential_file)
    else:
        text = told(None, access.CREDENTIAL, "--credential-file", "the credential")
    labels = tuple(label for label in environment.get(access.LABELS, "").split(",") if label)
    return Bootstrap(id=vm, cluster=named, nats_url=url, labels=labels, credential=_credential(text.strip()))


def hide_secret(environment: MutableMapping[str, str]) -> None:
    """Take the credential away from what the job can see: our environment, and what /proc shows of it.

    The kernel goes on showing the environment that a process was started with, so that copy is overwritten; and
    processes of the same user are kept from reading our memory (root can, whatever anybody does).
    """
    if environment.pop(access.CREDENTIAL, None) is not None:
        _overwrite_shown_environment()
    with contextlib.suppress(OSError, AttributeError):  # no such call: not a Linux
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _overwrite_shown_environment() -> None:
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
        block = ctypes.string_at(start, end - start)
        name = f"{access.CREDENTIAL}=".encode()
        at = 0 if block.startswith(name) else block.find(b"\0" + name) + 1
        if block[at:].startswith(name):
            value = at + len(name)
            ctypes.memset(start + value, ord("x"), block.index(b"\0", value) - value)


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise BootstrapError(f"credential file {path} can be read by others: `chmod 600` it")
            data = file.read(_CREDENTIAL_BYTES_MAX)
    except OSError as error:
        raise BootstrapError(f"credential file {path}: {error.strerror}") from error
    return data.decode("ascii", errors="replace")


def _credential(text: str) -> Credential:
    try:
        if text.startswith("-"):
            return parse_creds(text)
        claims = read_claims(text)
    except CredentialError as error:
        raise BootstrapError(
            f"the credential ({access.CREDENTIAL} or --credential-file): {error}; the text of a NATS creds file, "
            "or a bearer token alone, is expected"
        ) from error
    if not claims["nats"].get("bearer_token"):
        raise BootstrapError(
            "the credential is a token without its seed and no bearer token: it cannot connect"
        )
    return Credential(jwt=text, seed=None, public_key=claims["sub"])

"""The unprivileged user that PostgreSQL runs as when we are root: PostgreSQL refuses to be root."""

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from typing import TypedDict

from infra.embedded.errors import ServerFailed

_TIMEOUT_S = 30


class Identity(TypedDict, total=False):
    """What subprocess needs to run as a user."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class RunAs:
    """A user to run as; `switch` is empty when we already are that user."""

    uid: int
    gid: int
    switch: bool

    @property
    def identity(self) -> Identity:
        """Keyword arguments for subprocess: the user and its group, and none of our other groups."""
        return Identity(user=self.uid, group=self.gid, extra_groups=[]) if self.switch else Identity()


def unprivileged_user(name: str) -> RunAs:
    """Return ourselves, or, when we are root, the system user `name`, made when it is missing.

    A user of its own, because whoever shares its user id can read the data and reach the socket.
    """
    if os.geteuid() != 0:
        return RunAs(uid=os.geteuid(), gid=os.getegid(), switch=False)
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        _add(name)
        found = pwd.getpwnam(name)
    if found.pw_uid == 0:
        raise ServerFailed(f"user {name} is root by another name: PostgreSQL needs an unprivileged user")
    return RunAs(uid=found.pw_uid, gid=found.pw_gid, switch=True)


def _add(name: str) -> None:
    command = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    way_out = f"add a system user {name} yourself, or use a server you run with --postgres"
    if command is None:
        raise ServerFailed(f"as root PostgreSQL needs the user {name} and there is no useradd: {way_out}")
    options = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    done = subprocess.run(
        [command, *options, "--shell", "/usr/sbin/nologin", name],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    try:
        pwd.getpwnam(name)  # another coordinator may have added it at the same moment
    except KeyError:
        raise ServerFailed(
            f"as root PostgreSQL needs the user {name}, and useradd failed ({done.stderr.strip()}): {way_out}"
        ) from None

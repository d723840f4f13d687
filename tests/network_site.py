"""A host network of a test's own: namespaces that vanish with it, and TAPs driven frame by frame."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_numbers = itertools.count(1)


def need(kind: str, why: str, *, missing: bool) -> None:
    """Skip, or fail where FLEETLOG_REQUIRE names `kind`."""
    if missing:
        required = kind in os.environ.get("FLEETLOG_REQUIRE", "").split(",")
        (pytest.fail if required else pytest.skip)(why)


def need_network() -> None:
    """Require what every test of the host network needs."""
    need("root", "this test needs root", missing=os.geteuid() != 0)
    for tool in ("ip", "bridge", "nft", "sysctl"):
        need(
            "packages",
            f"this test needs `{tool}` (iproute2, nftables, procps)",
            missing=shutil.which(tool) is None,
        )
    if not Path("/dev/net/tun").exists():
        pytest.skip("this kernel has no /dev/net/tun")


@contextmanager
def namespace(role: str = "host") -> Iterator[Path]:
    """Lend a network namespace with loopback up."""
    name = f"flt-{role}-{os.getpid()}-{next(_numbers)}"
    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield Path("/run/netns") / name
    finally:
        run("ip", "netns", "del", name)


def run(*command: str, inside: Path | None = None) -> str:
    """Return what a command printed, run in a namespace if one is named."""
    prefix = () if inside is None else ("nsenter", f"--net={inside}")
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout

"""A network of a test's own: a namespace with one bridge, and a TAP for each guest."""

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000
_UID = 30_000
_BRIDGE_MAC = "06:00:0a:2c:00:01"
_numbers = itertools.count(1)


class Segment:
    """Exists from `with` to its end, when everything in it goes too. Needs root.

    Firecracker runs in the namespace, and so must whatever talks with guests: see `entered`.
    """

    gateway = IPv4Address("10.44.0.1")
    prefix_bits = 16
    uid = _UID
    """Who owns the TAPs, and as whom a jailed Firecracker must run."""

    def __init__(self) -> None:
        self.name = f"flt-test-{os.getpid()}-{next(_numbers)}"
        self.path = Path("/run/netns") / self.name
        self._hosts = itertools.count(int(self.gateway) + 4)

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self.name)
        try:
            self._disable_ipv6()
            self.ip_batch(
                "link set lo up",
                # An address of its own: else it takes the lowest of its ports', and loses every guest that has it in
                # its ARP table when a TAP with a lower one joins.
                f"link add br0 address {_BRIDGE_MAC} type bridge",
                f"addr add {self.gateway}/{self.prefix_bits} dev br0",
                "link set br0 up",
            )
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread, and every thread and process it starts, into the namespace for a while."""
        with open("/proc/thread-self/ns/net", "rb") as before, self.path.open("rb") as inside:  # noqa: PTH123
            _setns(inside.fileno())
            try:
                yield
            finally:
                _setns(before.fileno())

    def add_tap(self) -> tuple[str, IPv4Address]:
        """Make a TAP on the bridge for one more guest; return its name and the guest's address."""
        address = IPv4Address(next(self._hosts))
        tap = f"tap-{int(address):08x}"
        self.ip_batch(
            f"tuntap add dev {tap} mode tap user {self.uid} group {self.uid}",
            f"link set {tap} master br0",
            f"link set {tap} up",
        )
        return tap, address

    def run(self, *command: str) -> str:
        """Run a command in the namespace and return what it prints."""
        return _run("ip", "netns", "exec", self.name, *command)

    def ip_batch(self, *lines: str) -> None:
        """Run several `ip` commands at once."""
        _run("ip", "-n", self.name, "-batch", "-", text="\n".join(lines))

    def _disable_ipv6(self) -> None:
        # Else each TAP that comes up wakes every guest with multicasts. What /proc shows is the calling thread's.
        with self.entered():
            for scope in ("all", "default"):
                setting = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
                if setting.exists():  # not where the kernel has no IPv6 at all
                    setting.write_text("1")

    def _remove(self) -> None:
        _run("ip", "netns", "del", self.name)


def _setns(descriptor: int) -> None:
    # os.setns is there from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout

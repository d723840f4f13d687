"""One microVM with our guest, driven by hand: Firecracker bare or jailed, its API, its console."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from tests.guest.binaries import fetch_binaries
from tests.guest.build import build_guest
from tests.guest.segment import Segment

_DEADLINE_S = 10.0
_MEMORY_MIB = 32


class ApiRefused(Exception):  # noqa: N818 - the answer, not an accident
    """Firecracker said no."""


class MicroVm:
    """Runs from `boot` to its own end or to `kill`. `directory` must be empty and its own."""

    def __init__(self, segment: Segment, directory: Path, vm: str, *, jailed: bool = False) -> None:
        self.segment = segment
        self.vm = vm
        self.tap, self.address = segment.add_tap()
        self.mac = mac_of(self.address)
        self.spawned_at_s = 0.0
        self.directory = directory
        self._jailed = jailed
        self._root = directory / "firecracker" / vm / "root" if jailed else directory
        self._console = directory / f"{vm}.console"
        self._process: subprocess.Popen[bytes] | None = None

    def boot(
        self,
        metadata: Mapping[str, Any] | None,
        *,
        boot_args: str = "",
        drives: Mapping[str, Path] | None = None,
    ) -> None:
        """Start Firecracker, configure it, put the metadata (None: later, or never), start the guest."""
        self._root.mkdir(parents=True, exist_ok=True)
        kernel = self._place(build_guest(), "kernel")
        drive_paths = {name: self._place(path, name) for name, path in (drives or {}).items()}
        self._spawn()
        address = f"fleetlog.ip={self.address}/{self.segment.prefix_bits} fleetlog.gw={self.segment.gateway}"
        self.put("/machine-config", {"vcpu_count": 1, "mem_size_mib": _MEMORY_MIB})
        self.put("/boot-source", {"kernel_image_path": kernel, "boot_args": boot_args or address})
        for name, path in drive_paths.items():
            drive = {"drive_id": name, "path_on_host": path, "is_root_device": True, "is_read_only": True}
            self.put(f"/drives/{name}", drive)
        interface = {"iface_id": "eth0", "host_dev_name": self.tap, "guest_mac": self.mac}
        self.put("/network-interfaces/eth0", interface)
        self.put("/mmds/config", {"version": "V2", "network_interfaces": ["eth0"]})
        if metadata is not None:
            self.put_metadata(metadata)
        self.put("/actions", {"action_type": "InstanceStart"})

    def put_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace what the guest reads; at any time."""
        self.put("/mmds", {"latest": {"meta-data": dict(metadata)}})

    def press_ctrl_alt_del(self) -> None:
        """Press the keys."""
        self.put("/actions", {"action_type": "SendCtrlAltDel"})

    def put(self, path: str, body: Mapping[str, Any]) -> None:
        """Ask Firecracker's API; raises ApiRefused."""
        connection = _UnixConnection(self._root / "run" / "fc.sock")
        try:
            connection.request("PUT", path, json.dumps(body))
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ApiRefused(f"PUT {path}: {answer.status} {text}")

    @property
    def pid(self) -> int:
        """Firecracker's process; the jailer becomes it."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether Firecracker runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def console(self) -> str:
        """What the guest has written so far."""
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def wait_for(self, text: str, timeout_s: float = _DEADLINE_S) -> None:
        """Wait until the console has the text."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.console:
            assert time.monotonic() < deadline_s, (
                f"no {text!r} within {timeout_s} s; console:\n{self.console}"
            )
            assert self.running or text in self.console, f"ended without {text!r}; console:\n{self.console}"
            time.sleep(0.002)

    def wait(self, timeout_s: float = _DEADLINE_S) -> int:
        """Wait for Firecracker's end and return its exit code, below zero for a signal."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; console:\n{self.console}") from None

    def kill(self) -> None:
        """End it by force; repeatable."""
        if self._process is not None:
            if self.running:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(_DEADLINE_S)

    def _place(self, source: Path, name: str) -> str:
        """Put a file where Firecracker sees it, and return its path as seen from there."""
        target = self._root / name
        shutil.copyfile(source, target)
        target.chmod(0o644)
        return f"/{name}" if self._jailed else str(target)

    def _spawn(self) -> None:
        binaries = fetch_binaries()
        own = ["--level", "Off", "--api-sock"]
        (self._root / "run").mkdir(exist_ok=True)
        if self._jailed:
            jail = [
                "--id",
                self.vm,
                "--exec-file",
                str(binaries.firecracker),
                "--netns",
                str(self.segment.path),
            ]
            jail += ["--uid", str(self.segment.uid), "--gid", str(self.segment.uid)]
            jail += ["--chroot-base-dir", str(self.directory), "--", *own, "/run/fc.sock"]
            os.chown(self._root / "run", self.segment.uid, self.segment.uid)
            command = [str(binaries.jailer), *jail]
        else:
            command = [str(binaries.firecracker), *own, str(self._root / "run" / "fc.sock")]
        with self._console.open("wb") as console, self.segment.entered():
            self.spawned_at_s = time.monotonic()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
            )
        deadline_s = time.monotonic() + _DEADLINE_S
        while not (self._root / "run" / "fc.sock").exists():
            assert self.running, f"Firecracker did not start:\n{self.console}"
            assert time.monotonic() < deadline_s, "Firecracker has no API socket"
            time.sleep(0.0005)


def mac_of(address: IPv4Address) -> str:
    """Return a MAC address that follows from the IP address, so that no two guests of a network share one."""
    return ":".join(f"{part:02x}" for part in (0x06, 0x00, *address.packed))


class _UnixConnection(http.client.HTTPConnection):
    """HTTP on a Unix socket whose path may be longer than the 107 bytes that its address holds."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        folder = os.open(self._path.parent, os.O_PATH)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(_DEADLINE_S)
            deadline_s = time.monotonic() + _DEADLINE_S
            while True:
                try:
                    self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
                except ConnectionRefusedError:  # bound, but not listening yet
                    assert time.monotonic() < deadline_s, "Firecracker's API does not listen"
                    time.sleep(0.0005)
                else:
                    return
        finally:
            os.close(folder)

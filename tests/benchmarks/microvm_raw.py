"""A jailed microVM by hand: chroot, TAP and rules prepared, the jailer executed, all configured in one send, started.

The least that gives the same machine: nothing is decided, recorded, checked, watched or cleaned up after a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

from actors.decisions.addresses import Lease
from infra.network.host import HostNetwork
from infra.network.policy import Policy, elements
from tests.guest.binaries import Binaries

UID = 30_000
LOOK_S = 0.0003
OVERLAY_MIB = 16
MEMORY_MIB = 128


class Kit(NamedTuple):
    """What machines are made of. TAPs and rules are made by the product's own netlink messages: nothing is quicker."""

    base: Path
    binaries: Binaries
    kernel: Path
    rootfs: Path
    template: Path
    network: HostNetwork
    policy: Policy


class RawMachine:
    """One machine."""

    def __init__(self, kit: Kit, vm: str, lease: Lease) -> None:
        self.kit, self.vm, self.lease = kit, vm, lease
        self._directory = kit.base / "firecracker" / vm
        self._root = self._directory / "root"
        self._api: socket.socket | None = None
        self._pid = 0

    def start(self) -> float:
        """Bring it up; return when its start was accepted, by the monotonic clock."""
        self._prepare()
        self.kit.network.sets.put(self.lease.address, elements(self.lease, self.kit.policy))
        self.kit.network.links.attach(self.lease, UID, UID)
        self._execute()
        requests = self._requests()
        self._exchange(b"".join(_put(path, body) for path, body in requests), len(requests))
        self._exchange(_put("/actions", {"action_type": "InstanceStart"}), 1)
        return time.monotonic()

    def end(self) -> None:
        """Kill it and take everything away."""
        assert self._api is not None
        self._api.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.kit.network.links.park(self.lease.tap)
        self.kit.network.sets.drop(self.lease.address)
        shutil.rmtree(self._directory)

    def _prepare(self) -> None:
        self._root.mkdir(parents=True, mode=0o700)
        os.link(self.kit.kernel, self._root / "kernel")
        os.link(self.kit.rootfs, self._root / "rootfs.ext4")
        overlay = self._root / "overlay.ext4"
        copy_sparse(self.kit.template, overlay)
        for own in (overlay, self._root / "vmm.log"):
            own.touch(mode=0o600)
            os.chown(own, UID, UID)

    def _execute(self) -> None:
        jail = ["--id", self.vm, "--exec-file", str(self.kit.binaries.firecracker), "--uid", str(UID)]
        jail += ["--gid", str(UID), "--chroot-base-dir", str(self.kit.base)]
        own = ["--api-sock", "/run/api.sock", "--log-path", "/vmm.log", "--level", "Warning"]
        output = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._pid = os.posix_spawn(
            self.kit.binaries.jailer,
            ["jailer", *jail, "--", *own],
            {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._directory / "serial.log"), output, 0o600),
                (os.POSIX_SPAWN_OPEN, 2, str(self._directory / "stderr.log"), output, 0o600),
            ],
        )
        path = str(self._root / "run" / "api.sock")
        self._api = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                self._api.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(LOOK_S)
            else:
                return

    def _requests(self) -> list[tuple[str, dict[str, object]]]:
        lease = self.lease
        address = f"ip={lease.address}::{lease.gateway}:{lease.netmask}::eth0:off"
        return [
            ("/machine-config", {"vcpu_count": 1, "mem_size_mib": MEMORY_MIB}),
            ("/boot-source", {"kernel_image_path": "/kernel", "boot_args": f"console=ttyS0 {address}"}),
            ("/drives/rootfs", _drive("rootfs", root=True)),
            ("/drives/overlay", _drive("overlay", root=False)),
            (
                "/network-interfaces/eth0",
                {"iface_id": "eth0", "guest_mac": lease.mac, "host_dev_name": lease.tap},
            ),
            ("/mmds/config", {"version": "V2", "network_interfaces": ["eth0"]}),
            ("/mmds", {"latest": {"meta-data": {"FLEETLOG_AGENT_ID": self.vm}}}),
        ]

    def _exchange(self, data: bytes, answers: int) -> None:
        assert self._api is not None
        self._api.sendall(data)
        received = b""
        while received.count(b"HTTP/1.1 204") < answers:
            piece = self._api.recv(65_536)
            if not piece or b"fault_message" in piece:
                raise RuntimeError(f"Firecracker refused: {(received + piece).decode(errors='replace')}")
            received += piece


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file's data and leave its holes."""
    with source.open("rb") as reader, target.open("xb") as writer:
        length = os.fstat(reader.fileno()).st_size
        writer.truncate(length)
        start = 0
        while start < length:
            try:
                start = os.lseek(reader.fileno(), start, os.SEEK_DATA)
            except OSError:
                return  # only a hole is left
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            start += os.pwrite(writer.fileno(), os.pread(reader.fileno(), end - start, start), start)


def _drive(name: str, *, root: bool) -> dict[str, object]:
    return {
        "drive_id": name,
        "path_on_host": f"/{name}.ext4",
        "is_root_device": root,
        "is_read_only": root,
    }


def _put(path: str, body: dict[str, object]) -> bytes:
    text = json.dumps(body)
    return (
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}"
    ).encode()

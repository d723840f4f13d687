"""A guest without a machine: opens a TAP and writes and reads Ethernet frames, honest or forged."""

import fcntl
import ipaddress
import itertools
import os
import select
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.decisions.addresses import Lease
from infra.network.namespace import entered
from infra.network.rtnetlink import mac_bytes

ARP, IP = 0x0806, 0x0800
ICMP, TCP, UDP = 1, 6, 17
BROADCAST = b"\xff" * 6
SYN_ACK = 0x12
_FRAME_MOST = 2048
_ports = itertools.count(20000)
"""Never used twice: a server's late answer to a guest of before is no answer to this one."""


class TapGuest:
    """Holds the TAP open like a machine does. `gateway_mac` is the bridge's."""

    def __init__(self, lease: Lease, namespace: Path, gateway_mac: str = "06:00:AC:2C:00:01") -> None:
        self.lease = lease
        self.mac = mac_bytes(lease.mac)
        self.address = packed(lease.address)
        self.gateway_mac = mac_bytes(gateway_mac)
        self._namespace = namespace
        with entered(namespace):
            self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(self._tap, 0x400454CA, struct.pack("16sH22x", lease.tap.encode(), 0x0002 | 0x1000))
        self.wait_for_the_bridge()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._tap)

    def wait_for_the_bridge(self) -> None:
        """Wait until the bridge forwards: the kernel's link watch tells it only a moment after the TAP is open."""
        deadline = time.monotonic() + 5
        show = ["nsenter", f"--net={self._namespace}", "bridge", "-d", "link", "show", "dev", self.lease.tap]
        while (
            "state forwarding" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout
        ):
            assert time.monotonic() < deadline, "the bridge does not forward for the TAP"

    def send(self, frame: bytes) -> None:
        """Put a frame on the wire."""
        os.write(self._tap, frame)

    def receive(self, wanted: Callable[[bytes], bool], timeout_s: float = 0.25) -> bytes | None:
        """Return the first frame that is `wanted`, None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._tap], [], [], left)[0]:
                frame = os.read(self._tap, _FRAME_MOST)
                if wanted(frame):
                    return frame
        return None

    def ask(
        self,
        protocol: int,
        target: str,
        port: int = 0,
        *,
        source: str | None = None,
        mac: bytes | None = None,
        timeout_s: float = 0.4,
    ) -> bool:
        """Send a UDP datagram, a TCP SYN or an ICMP echo, and tell whether the target itself answered."""
        return self.ask_all((protocol,), target, port, source=source, mac=mac, timeout_s=timeout_s) == {
            protocol
        }

    def ask_all(
        self,
        protocols: Iterable[int],
        target: str,
        port: int = 0,
        *,
        source: str | None = None,
        mac: bytes | None = None,
        timeout_s: float = 0.6,
    ) -> set[int]:
        """Ask by several protocols at once, and return those by which the target itself answered in time."""
        ours, there = next(_ports), packed(target)
        sender = self.address if source is None else packed(source)
        head = ethernet(self.gateway_mac, mac or self.mac, IP)
        missing = set(protocols)
        for protocol in protocols:
            self.send(head + datagram(protocol, sender, there, ours, port))
        answered: set[int] = set()

        def answers(frame: bytes) -> bool:
            if frame[12:14] != struct.pack("!H", IP) or frame[23] not in missing or frame[26:30] != there:
                return False
            if frame[23] == ICMP:
                return frame[34] == 0 and frame[38:40] == struct.pack("!H", ours)
            if struct.unpack_from("!HH", frame, 34) != (port, ours):
                return False
            return frame[23] != TCP or frame[47] == SYN_ACK  # the connection would be open

        deadline = time.monotonic() + timeout_s
        while missing and (frame := self.receive(answers, deadline - time.monotonic())) is not None:
            missing.remove(frame[23])
            answered.add(frame[23])
        return answered

    def arp(
        self, target: str, *, source: str | None = None, mac: bytes | None = None, inner: bytes | None = None
    ) -> bool:
        """Ask who has `target`, and tell whether anybody answered."""
        sender = self.address if source is None else packed(source)
        self.send(arp_frame(1, mac or self.mac, inner or mac or self.mac, sender, packed(target)))

        def answers(frame: bytes) -> bool:
            return frame[12:14] == struct.pack("!H", ARP) and frame[28:32] == packed(target)

        return self.receive(answers) is not None


def packed(address: str) -> bytes:
    """Return an address's four bytes."""
    return ipaddress.IPv4Address(address).packed


def ethernet(to: bytes, sender: bytes, kind: int) -> bytes:
    """Return an Ethernet header."""
    return to + sender + struct.pack("!H", kind)


def arp_frame(operation: int, mac: bytes, inner: bytes, sender: bytes, target: bytes) -> bytes:
    """Return an ARP frame; an honest one has its MAC also inside."""
    head = ethernet(BROADCAST, mac, ARP) + struct.pack("!HHBBH", 1, IP, 6, 4, operation)
    return head + inner + sender + b"\0" * 6 + target


def datagram(protocol: int, sender: bytes, target: bytes, source_port: int, port: int) -> bytes:
    """Return an IPv4 packet: UDP with one byte, a TCP SYN, or an ICMP echo (`source_port` is its id)."""
    if protocol == ICMP:
        payload = _summed(struct.pack("!BBHHH", 8, 0, 0, source_port, 1), 2, b"")
    else:
        if protocol == UDP:
            payload, place = struct.pack("!HHHH", source_port, port, 9, 0) + b"x", 6
        else:
            options = struct.pack("!BBH", 2, 4, 1460)
            payload = struct.pack("!HHIIBBHHH", source_port, port, 1, 0, 6 << 4, 2, 64000, 0, 0) + options
            place = 16
        payload = _summed(payload, place, sender + target + struct.pack("!HH", protocol, len(payload)))
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0) + sender + target
    return _summed(header, 10, b"") + payload


def _summed(packet: bytes, place: int, pseudo: bytes) -> bytes:
    data = pseudo + packet + b"\0" * (len(packet) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return packet[:place] + struct.pack("!H", ~total & 0xFFFF) + packet[place + 2 :]

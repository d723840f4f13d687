"""The nft sets through the `nft` program, with sudo where we lack the right: slower, the same promises."""

import ipaddress
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from actors.errors import DriverError
from infra.network.commands import CommandFailed
from infra.network.nft import Nft
from infra.network.policy import BY_NAME, SETS, Element, element_text, owner
from infra.network.policy_sets import CONTENTION_MOST, contended, no_table, pause_s

_GONE = "No such file or directory"


class CommandSets:
    """`PolicySets` by commands. Keeps nothing: every exchange reads first."""

    def __init__(self, nft: Nft, table: str) -> None:
        self._nft = nft
        self._table = table
        self._lock = threading.Lock()

    def close(self) -> None:
        """Do nothing: there is nothing to let go."""

    def put(self, address: str, elements: frozenset[Element]) -> None:
        """See `PolicySets`."""
        with self._lock:
            for tries in range(CONTENTION_MOST):
                have = self._read().get(address, frozenset())
                if have == elements:
                    return
                lines = [*self._lines("delete", have - elements), *self._lines("add", elements - have)]
                try:
                    self._nft.apply("\n".join(lines))
                except CommandFailed as error:
                    # What was to be deleted is gone already, or what was to be added is there: look again.
                    if _GONE not in error.stderr and "File exists" not in error.stderr:
                        raise
                    time.sleep(pause_s(tries))
                    continue
                if self._read().get(address, frozenset()) == elements:
                    return
        raise contended(self._table)

    def drop(self, address: str) -> None:
        """See `PolicySets`."""
        try:
            self.put(address, frozenset())
        except DriverError as error:
            if error.kind != "missing":
                raise

    def held(self) -> dict[str, frozenset[Element]]:
        """See `PolicySets`."""
        return self._read()

    def _lines(self, verb: str, elements: Iterable[Element]) -> list[str]:
        return [
            f"{verb} element {BY_NAME[each.set].family} {self._table} {each.set} {{ {element_text(each)} }}"
            for each in sorted(elements)
        ]

    def _read(self) -> dict[str, frozenset[Element]]:
        found: dict[str, set[Element]] = {}
        for each in SETS:
            try:
                listed = self._nft.listing("set", each.family, self._table, each.name)
            except CommandFailed as error:
                if _GONE in error.stderr:
                    raise no_table(self._table, error.stderr) from error
                raise
            for item in listed:
                for written in item.get("set", {}).get("elem", ()):
                    element = _element(each.name, written)
                    found.setdefault(owner(element), set()).add(element)
        return {address: frozenset(elements) for address, elements in found.items()}


def _element(name: str, written: Any) -> Element:
    kinds = BY_NAME[name].type.split(" . ")
    fields = written["concat"] if len(kinds) > 1 else [written]
    pairs = [_field(kind, field) for kind, field in zip(kinds, fields, strict=True)]
    first, last = (b"".join(side) for side in zip(*pairs, strict=True))
    return Element(name, first, last if BY_NAME[name].ranges else b"")


def _field(kind: str, written: Any) -> tuple[bytes, bytes]:
    match kind, written:
        case "ipv4_addr", {"prefix": {"addr": address, "len": length}}:
            network = ipaddress.IPv4Network(f"{address}/{length}")
            return network.network_address.packed, network.broadcast_address.packed
        case "ipv4_addr", {"range": [low, high]}:
            return ipaddress.IPv4Address(low).packed, ipaddress.IPv4Address(high).packed
        case "ipv4_addr", str():
            packed = ipaddress.IPv4Address(written).packed
        case "inet_proto", _:
            packed = bytes([{"tcp": 6, "udp": 17}.get(written) or int(written), 0, 0, 0])
        case "inet_service", _:
            packed = int(written).to_bytes(2, "big") + b"\0\0"
        case "ifname", str():
            packed = written.encode().ljust(16, b"\0")
        case "ether_addr", str():
            packed = bytes.fromhex(written.replace(":", "")) + b"\0\0"
        case _:
            raise DriverError(
                "unknown",
                f"nft shows {msgspec.json.encode(written).decode()}, which is no {kind}",
                transient=False,
            )
    return packed, packed

"""The nft sets through the kernel's own interface: read, compared and exchanged as one transaction, in this process.

The kernel counts every change of the host's rules. An exchange names the count it was computed at, and the kernel
refuses it if anybody changed anything since: so nothing that an address inherited from elsewhere can be overlooked.
"""

import errno
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from actors.errors import DriverError
from infra.network.netlink import (
    F_ACK,
    F_CREATE,
    Message,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    each_attribute,
    nested,
    text,
)
from infra.network.policy import BY_NAME, SETS, Element, NftSet, owner, parse_address
from infra.network.policy_sets import CONTENTION_MOST, contended, no_table, pause_s

_NETLINK_NETFILTER = 12
_NFTABLES = 10
_NEW_ELEMENT, _GET_ELEMENT, _DELETE_ELEMENT, _GET_GENERATION = 12, 13, 14, 16
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_BATCH_GENERATION, _GENERATION_ID = 1, 1
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ITEM = 1, 2, 3, 1
_KEY, _KEY_END, _VALUE = 1, 10, 1
_FAMILIES = {"inet": 1, "bridge": 7}
_PER_MESSAGE = 200
"""Elements in one message: an attribute's length is 16 bits."""

_ELEMENTS_MOST = 100_000
_ERESTART = 85
_AGAIN = {_ERESTART, errno.EAGAIN, errno.EINTR}


class NetlinkSets:
    """`PolicySets` for a process with CAP_NET_ADMIN, over one kept socket."""

    def __init__(self, table: str, namespace: Path | None = None) -> None:
        self._table = table
        self._netlink = Netlink(_NETLINK_NETFILTER, namespace)
        self._lock = threading.Lock()
        self._generation: int | None = None
        self._held: dict[str, frozenset[Element]] = {}
        self._certain: set[str] | None = None  # addresses `_held` is right about; None: about all

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def put(self, address: str, elements: frozenset[Element]) -> None:
        """See `PolicySets`."""
        with self._lock:
            self._exchange(address, elements)

    def drop(self, address: str) -> None:
        """See `PolicySets`."""
        with self._lock:
            try:
                self._exchange(address, frozenset())
            except DriverError as error:
                if error.kind != "missing":
                    raise

    def held(self) -> dict[str, frozenset[Element]]:
        """See `PolicySets`."""
        with self._lock:
            self._look(self._current())
            return {address: elements for address, elements in self._held.items() if elements}

    def _exchange(self, address: str, wanted: frozenset[Element]) -> None:
        for tries in range(CONTENTION_MOST):
            generation = self._current()
            have = self._have(address, generation)
            if have == wanted:
                return
            try:
                self._commit(generation, sorted(have - wanted), sorted(wanted - have))
            except NetlinkError as error:
                self._certain = set()  # nothing was changed, and what we believed may be wrong
                if error.number in _AGAIN:
                    time.sleep(pause_s(tries))
                    continue
                raise _failed(self._table, f"change what {address} may reach", error) from error
            self._held[address] = wanted
            # The kernel's count after our own change; zero is left out.
            self._generation = (generation + 1) & 0xFFFFFFFF or 1
            return
        raise contended(self._table)

    def _have(self, address: str, generation: int) -> frozenset[Element]:
        if self._generation is None:
            self._look(generation)
        elif generation != self._generation:
            # Somebody changed some rule of the host; seldom one of ours, but nothing known is certain any more.
            self._generation = generation
            self._certain = set()
        if self._certain is not None and address not in self._certain:
            # One address is picked out without reading all the others'.
            found = {element for each in SETS for element in self._list(each, parse_address(address))}
            self._held[address] = frozenset(each for each in found if owner(each) == address)
            self._certain.add(address)
        return self._held.get(address, frozenset())

    def _look(self, generation: int) -> None:
        found: dict[str, set[Element]] = {}
        self._generation = None
        for each in SETS:
            for element in self._list(each):
                found.setdefault(owner(element), set()).add(element)
        self._held = {address: frozenset(elements) for address, elements in found.items()}
        self._certain = None
        # If somebody changed a rule meanwhile, the exchange is refused and we look again.
        self._generation = generation

    def _list(self, each: NftSet, address: bytes = b"") -> Iterable[Element]:
        body = text(_LIST_TABLE, self._table) + text(_LIST_SET, each.name)
        try:
            answers = self._netlink.dump(_message(_GET_ELEMENT, 0, _FAMILIES[each.family], body))
        except NetlinkError as error:
            raise _failed(self._table, f"read set {each.name}", error) from error
        for answer in answers:
            for _, item in each_attribute(attributes(answer[4:]).get(_LIST_ELEMENTS, b"")):
                if address not in item:
                    continue
                fields = attributes(item)
                first = attributes(fields[_KEY])[_VALUE]
                last = attributes(fields[_KEY_END])[_VALUE] if _KEY_END in fields else b""
                yield Element(each.name, first, last)

    def _current(self) -> int:
        try:
            answer = self._netlink.ask(_message(_GET_GENERATION, 0, 0, b""))
        except NetlinkError as error:
            raise _failed(self._table, "read the rules' count", error) from error
        return int(struct.unpack("!I", attributes(answer[4:])[_GENERATION_ID])[0])

    def _commit(self, generation: int, gone: Sequence[Element], new: Sequence[Element]) -> None:
        changes = [*self._changes(_DELETE_ELEMENT, 0, gone), *self._changes(_NEW_ELEMENT, F_CREATE, new)]
        last = changes[-1]
        changes[-1] = Message(last.type, last.flags | F_ACK, last.body)
        header = struct.pack("!BBH", 0, 0, _NFTABLES)
        begin = Message(_BATCH_BEGIN, 0, header + attribute(_BATCH_GENERATION, struct.pack("!I", generation)))
        self._netlink.send([begin, *changes, Message(_BATCH_END, 0, header)], acknowledged=len(changes))

    def _changes(self, kind: int, flags: int, elements: Sequence[Element]) -> list[Message]:
        assert len(elements) <= _ELEMENTS_MOST, "more than a policy can hold"
        by_set: dict[str, list[Element]] = {}
        for element in elements:
            by_set.setdefault(element.set, []).append(element)
        messages = []
        for name, members in by_set.items():
            for start in range(0, len(members), _PER_MESSAGE):
                items = (_item(each) for each in members[start : start + _PER_MESSAGE])
                body = text(_LIST_TABLE, self._table) + text(_LIST_SET, name) + nested(_LIST_ELEMENTS, *items)
                messages.append(_message(kind, flags, _FAMILIES[BY_NAME[name].family], body))
        return messages


def _item(element: Element) -> bytes:
    parts = [nested(_KEY, attribute(_VALUE, element.first))]
    if element.last:
        parts.append(nested(_KEY_END, attribute(_VALUE, element.last)))
    return nested(_LIST_ITEM, *parts)


def _message(kind: int, flags: int, family: int, body: bytes) -> Message:
    return Message(_NFTABLES << 8 | kind, flags, struct.pack("!BBH", family, 0, 0) + body)


def _failed(table: str, what: str, error: NetlinkError) -> DriverError:
    if error.number == errno.ENOENT:
        return no_table(table, str(error))
    if error.number in {errno.EPERM, errno.EACCES}:
        message = f"nft table {table}: could not {what}: {error}; it needs CAP_NET_ADMIN: run as root or set use_sudo"
        return DriverError("refused", message, transient=False)
    if error.number in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT}:
        message = f"nft table {table}: could not {what}: {error}; the kernel lacks nf_tables"
        return DriverError("missing", message, transient=False)
    return DriverError("unknown", f"nft table {table}: could not {what}: {error}", transient=True)

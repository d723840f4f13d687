"""The network of this host: made ready, checked, healed, and lent to one machine at a time."""

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from actors.decisions.addresses import AddressPool, Lease, lease_of
from actors.errors import DriverError
from infra.config.microvm_network import MicrovmNetwork
from infra.network import provisioning, settings_files
from infra.network.links import BRIDGE_PORTS_MOST, TapState, bridge_full
from infra.network.parts import open_parts, taps_of
from infra.network.policy import Policy, elements
from infra.network.verify import Verdict, verify

logger = logging.getLogger(__name__)

Live = Iterable[tuple[Lease, Policy]]
"""The machines there are, with what each may reach."""


class HostNetwork:
    """One bridge with its nft table. Safe from several threads; one coordinator per bridge.

    In process where we hold CAP_NET_ADMIN; with `sudo`, through `sudo -n` and the host's programs. `namespace` is
    the network namespace it lives in, None for our own; `etc` is where the host's settings are.
    """

    def __init__(
        self,
        config: MicrovmNetwork,
        *,
        sudo: bool = False,
        namespace: Path | None = None,
        etc: Path = Path("/etc"),
    ) -> None:
        self.config = config
        self.parts = open_parts(config, sudo=sudo, namespace=namespace, etc=etc)
        self.links, self.sets = self.parts.links, self.parts.sets
        self._lock = threading.Lock()
        self._parked: set[str] | None = None
        self._guarded: frozenset[int] = frozenset()
        self._room_left = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of sockets; the network stays. Repeatable."""
        self.links.close()
        self.sets.close()

    def pool(self, aggregate: str) -> AddressPool:
        """Return the addresses as the allocator has them; `aggregate` is where their leases are written."""
        config = self.config
        return AddressPool(
            aggregate=aggregate, cidr=config.cidr, gateway=config.gateway, bridge=config.bridge
        )

    # Making ready

    def provision(self) -> None:
        """Bring the host's part into being: rules first, then the bridge. Repeatable at any time, with machines running.

        Deletes no table, empties no set, leaves rules of others where they are.

        Raises:
            DriverError: the bridge or table is somebody else's, the network overlaps one of the host's, there is no
                way out of the host, or we lack a program or the right.
        """
        with self._lock:
            provisioning.provision(self.parts)

    def verify(self) -> Verdict:
        """Return everything that is not as it should be. Reads only, never raises."""
        return verify(self.parts, self._guarded)

    def ensure_ready(self, live: Live = ()) -> Verdict:
        """Heal what is not as it should be, see that every machine has its policy; return what still is wrong.

        Without `auto_provision_host` it only looks.

        Raises:
            DriverError: as `provision`; or the kernel does not isolate ports.
        """
        verdict = self.verify()
        if not self.config.auto_provision_host:
            return verdict
        if verdict.healthy:
            return self.verify() if self.reapply(live) else verdict
        logger.warning("host network %s is not ready, healing: %s", self.config.bridge, verdict.detail)
        self.provision()
        self.probe_isolation()
        self._drop_stray_taps()
        self.reapply(live)
        return self.verify()

    def probe_isolation(self) -> None:
        """Make a TAP like a machine's, see that its port is isolated, and remove it.

        Raises:
            DriverError: ports cannot be isolated here. A host where no TAP can be made at all is told by the log only.
        """
        probe = lease_of(self.pool(""), str(self.config.network.network_address))
        try:
            self.links.delete(probe.tap)
            self.links.attach(probe, 0, 0)
        except DriverError as error:
            if "isolate" in str(error):
                raise
            logger.warning("isolation of bridge %s was not probed: %s", self.config.bridge, error)
        finally:
            self.links.delete(probe.tap)

    def reapply(self, live: Live) -> Mapping[str, DriverError]:
        """Write the policy of every machine again, and isolate its port again; return what failed, by address."""
        failed = {}
        states = {tap.name: tap for tap in self.links.taps()}
        for lease, policy in live:
            try:
                self.sets.put(lease.address, elements(lease, policy))
                if lease.tap in states:
                    self.links.restore(lease)
            except DriverError as error:
                logger.error("policy of %s was not written again: %s", lease.address, error)  # noqa: TRY400
                failed[lease.address] = error
        return failed

    def teardown(self, *, force: bool = False) -> None:
        """Remove the table, the bridge and our TAPs; what is not there is fine.

        Raises:
            DriverError: machines still use TAPs (unless `force`), or the bridge is somebody else's.
        """
        with self._lock:
            provisioning.teardown(self.parts, force=force)
            self._parked = None

    def persist(self) -> list[Path]:
        """Have the network come back at every boot without us; return the files written. Repeatable.

        Raises:
            DriverError: a file cannot be written.
        """
        return settings_files.persist(self.parts)

    def forget(self) -> list[Path]:
        """Remove what `persist` wrote; return the files that were there."""
        return settings_files.forget(self.parts)

    def guard_port(self, *ports: int) -> None:
        """Admit these TCP ports of the host, and no others guarded before, only from loopback and our bridge.

        To be called before a server listens there beyond loopback: when it returns, the guard stands.

        Raises:
            DriverError: the rules are not there and may not be made (`auto_provision_host` is off), or nft failed.
        """
        with self._lock:
            if self.config.auto_provision_host:
                provisioning.ensure_rules(self.parts)
            provisioning.guard(self.parts, ports)
            self._guarded = frozenset(ports)

    # One machine

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        """Give the address a TAP that uid:gid may open, with its policy in force before a frame can pass.

        Whatever the address had before is gone in the same transaction that brings the new policy.

        Raises:
            DriverError: nothing of it is left in force.
            ValueError: an entry of the policy has another form.
        """
        self.sets.put(lease.address, elements(lease, policy))
        try:
            self.links.attach(lease, uid, gid)
        except DriverError:
            self.sets.drop(lease.address)
            raise
        with self._lock:
            if self._parked is not None:
                self._parked.discard(lease.tap)

    def release(self, lease: Lease) -> None:
        """Take the address's network away: TAP down, policy gone. The TAP is kept if fewer than `idle_taps` are.

        Repeatable; nothing there is fine.
        """
        keep = self._may_keep(lease.tap)
        try:
            if keep:
                self.links.park(lease.tap)
        finally:
            self.sets.drop(lease.address)
        if not keep:
            self.links.delete(lease.tap)

    def remove_tap(self, tap: str) -> None:
        """Remove a TAP that is nobody's, instead of keeping it. One that is not there is fine."""
        self.links.delete(tap)
        with self._lock:
            if self._parked is not None:
                self._parked.discard(tap)

    def forbid(self, address: str) -> None:
        """Remove the address's policy alone: from now on nothing of it passes."""
        self.sets.drop(address)

    # What there is

    def taps(self) -> list[TapState]:
        """Return the TAPs of this network's addresses, idle ones included."""
        return taps_of(self.parts)

    def idle(self) -> frozenset[str]:
        """Return the TAPs kept without a machine: they leak nothing and may be taken up again."""
        return frozenset(tap.name for tap in self.taps() if not tap.up)

    def occupied(self) -> frozenset[str]:
        """Return the addresses whose TAP is up: the allocator should not choose them."""
        return frozenset(tap.address for tap in self.taps() if tap.up)

    def policies(self) -> frozenset[str]:
        """Return the addresses that have a policy in force, for the sweep."""
        return frozenset(self.sets.held())

    def room(self) -> int:
        """Return how many more TAPs could be up: ports the bridge has left, and idle TAPs that have theirs."""
        return max(0, BRIDGE_PORTS_MOST - self.links.ports(self.config.bridge)) + len(self.idle())

    def check_room(self) -> None:
        """Refuse a spawn that could get no port; counts anew only after as many calls as there was room.

        Raises:
            DriverError: kind "exhausted".
        """
        with self._lock:
            if self._room_left > 0:
                self._room_left -= 1
                return
        room = self.room()
        if room == 0:
            raise bridge_full(self.config.bridge)
        with self._lock:
            self._room_left = room - 1

    def _drop_stray_taps(self) -> None:
        # Idle TAPs that fell off a bridge which was made again, or lost their isolation: made anew when needed.
        for tap in self.taps():
            if not tap.up and (
                tap.bridge != self.config.bridge or not tap.isolated or tap.learning or tap.flooding
            ):
                self.links.delete(tap.name)
        with self._lock:
            self._parked = None

    def _may_keep(self, tap: str) -> bool:
        with self._lock:
            if self._parked is None:
                self._parked = set(self.idle())
            if tap not in self._parked and len(self._parked) >= self.config.idle_taps:
                return False
            self._parked.add(tap)
            return True

"""What is left of addresses on this host's network: TAPs that are up for nobody, and rules in force for nobody."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address

from actors.errors import DriverError, Refused
from actors.reclaiming import Leftover, Life
from infra.network.host import HostNetwork
from infra.network.links import TapState


class NetworkLeftovers:
    """The `Reclaiming` of one bridge, which serves one coordinator. Idle TAPs are no leftovers: they are kept on purpose.

    A TAP that a process has open has a carrier: that proves life without any record. TAPs on another bridge, and the
    rules of other tables, are never seen as ours; the bridge itself is none, whatever it is called.
    """

    def __init__(self, network: HostNetwork, owner: str) -> None:
        self._network = network
        self._owner = owner

    def leftovers(self) -> tuple[Leftover, ...]:
        """List every TAP of this network that is not idle, and every address with rules."""
        network = self._network
        taps = [tap for tap in network.taps() if self._counts(tap)]
        by_address = {tap.address: tap for tap in taps}
        rules = sorted(each for each in self._ruled() if IPv4Address(each) in network.config.network)
        found = [self._tap(tap) for tap in taps]
        return (*found, *(self._rules(address, by_address.get(address)) for address in rules))

    def reclaim(self, leftover: Leftover) -> str:
        """Remove the TAP, or the rules, if still nothing uses the address."""
        network = self._network
        taps = {tap.address: tap for tap in network.taps()}
        tap = taps.get(leftover.address)
        if tap is not None and tap.carrier:
            raise DriverError("still-there", f"a process has {tap.name} open", transient=True)
        if leftover.kind == "rules":
            network.forbid(leftover.address)
            return f"everything of {leftover.address} removed from the sets of both families"
        if leftover.name == network.config.bridge:
            raise DriverError("refused", f"{leftover.name} is the bridge", transient=False)
        network.remove_tap(leftover.name)
        return f"{leftover.name} removed"

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """Refuse: nothing of a network lives."""
        del accounted
        raise Refused("not-live", f"{leftover.kind} {leftover.name} is no machine")

    def _ruled(self) -> frozenset[str]:
        try:
            return self._network.policies()
        except DriverError as error:
            if error.kind == "missing":
                return frozenset()  # no table, no rules
            raise

    def _counts(self, tap: TapState) -> bool:
        return tap.name != self._network.config.bridge and (
            tap.up or tap.bridge != self._network.config.bridge
        )

    def _tap(self, tap: TapState) -> Leftover:
        bridge = self._network.config.bridge
        ours = tap.bridge in (None, bridge)
        life: Life = "alive" if tap.carrier else "dead"
        where = "on no bridge" if tap.bridge is None else f"on bridge {tap.bridge}"
        state = "a process has it open" if tap.carrier else "no process has it open"
        return Leftover(
            kind="tap",
            name=tap.name,
            vm=None,
            owner=self._owner if ours else f"bridge {tap.bridge}",
            life=life,
            evidence=f"{where}; {state}",
            address=tap.address,
        )

    def _rules(self, address: str, tap: TapState | None) -> Leftover:
        used = tap is not None and tap.carrier
        return Leftover(
            kind="rules",
            name=address,
            vm=None,
            owner=self._owner,
            life="alive" if used else "dead",
            evidence=f"in table {self._network.config.nft_table}",
            address=address,
        )

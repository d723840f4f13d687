"""What guests may reach, shown by their own packets; addresses that run out; coordinators side by side on one host."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.acceptance.host import wait_until
from tests.acceptance.microvm_place import MicrovmPlace
from tests.network_site import (
    ALLOWLISTED,
    EVERYWHERE,
    INTERNAL,
    METADATA,
    OPEN_PORT,
    OUTSIDE,
    NetworkSite,
    network_site,
    run,
)

GATEWAY = "10.44.0.1"
NATS_PORT = 4222
DNS_PORT, OWN_PORT = 53, 7001
ALLOWLIST = [f"{ALLOWLISTED}/32"]
POLICIES = {
    "plain": {},
    "allowed": {"network_policy": {"allowlist": ALLOWLIST}},
    "denied": {"network_policy": {"allowlist": ALLOWLIST, "deny_all": True}},
    "host": {"network_policy": {"host_access": [str(NATS_PORT), f"{GATEWAY}:{OWN_PORT}"]}},
}
LOOK = "; ".join(
    [
        *(f"connect {address} {OPEN_PORT}" for address in EVERYWHERE),
        *(f"connect {GATEWAY} {port}" for port in (NATS_PORT, DNS_PORT, OWN_PORT)),
        "print looked",
    ]
)
DNS, OWN, NATS = f"{GATEWAY}:{DNS_PORT}", f"{GATEWAY}:{OWN_PORT}", f"{GATEWAY}:{NATS_PORT}"
OPEN = {
    "plain": {f"{OUTSIDE}:{OPEN_PORT}", DNS, NATS},
    "allowed": {f"{OUTSIDE}:{OPEN_PORT}", f"{ALLOWLISTED}:{OPEN_PORT}", DNS, NATS},
    "denied": {f"{ALLOWLISTED}:{OPEN_PORT}", DNS, NATS},
    "host": {f"{OUTSIDE}:{OPEN_PORT}", OWN, NATS},
}
"""What each guest can connect to, and nothing else."""


class Neighbours:
    """One running guest of each policy."""

    def __init__(self, place: MicrovmPlace) -> None:
        self.place = place
        self.vms = {kind: place.ask_for(kind)[0] for kind in POLICIES}
        place.wait_phases(self.vms.values(), "registered")
        self.addresses = {kind: place.lives()[vm].address for kind, vm in self.vms.items()}

    def said(self, kind: str, steps: str, last: str) -> list[str]:
        """Have a guest do steps; return what it reports of them, once it has reported `last`."""
        vm = self.vms[kind]
        before = len(self.place.console(vm))
        self.place.tell(vm, steps)
        try:
            wait_until(lambda: last in self.place.console(vm)[before:], f"{vm} reports {last}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.place.console(vm)}") from None
        return self.place.console(vm)[before:].splitlines()


@pytest.fixture(scope="module")
def neighbours() -> Iterator[Neighbours]:
    with network_site() as site:
        place = MicrovmPlace(site, kinds=dict.fromkeys(POLICIES, "wait"), sets=POLICIES)
        try:
            place.start("--nats-port", str(NATS_PORT))
            site.serve(site.host, (GATEWAY, DNS_PORT), (GATEWAY, OWN_PORT))
            made = Neighbours(place)
            yield made
            for vm in made.vms.values():
                place.tell(vm, "exit 0")
            place.settle()
        finally:
            place.clean()


def opened(lines: list[str]) -> set[str]:
    """Return the addresses that a guest could connect to."""
    words = [line.removeprefix("guest: ").split() for line in lines]
    return {each[1] for each in words if each[:1] == ["connect"] and each[2] == "open"}


def test_each_guest_reaches_what_its_policy_allows_and_nothing_else(neighbours: Neighbours) -> None:
    for vm in neighbours.vms.values():
        neighbours.place.tell(vm, LOOK)
    for kind, vm in neighbours.vms.items():
        neighbours.place.wait_console(vm, "looked", 30)
        lines = neighbours.place.console(vm).splitlines()
        assert sum("connect " in line for line in lines) == len(EVERYWHERE) + 3
        assert opened(lines) == OPEN[kind], kind
    assert f"{INTERNAL}:{OPEN_PORT}" not in set().union(*OPEN.values())
    assert f"{METADATA}:{OPEN_PORT}" not in set().union(*OPEN.values())


def test_guests_do_not_reach_each_other(neighbours: Neighbours) -> None:
    for kind in POLICIES:
        other = next(neighbours.addresses[each] for each in POLICIES if each != kind)
        lines = neighbours.said(kind, f"connect {other} 22", f"connect {other}:22")
        assert f"guest: connect {other}:22 no-arp" in lines


def test_forged_frames_are_dropped_before_the_bridge_learns_from_them(neighbours: Neighbours) -> None:
    place = neighbours.place
    victim = neighbours.addresses["plain"]
    mac = place.lives()[neighbours.vms["plain"]].placement["lease"]["mac"]
    for forged in (f"forge-ip {victim}", f"forge-mac {mac}", f"forge-arp {victim}", f"forge-arp {GATEWAY}"):
        before = dropped(place.site)
        neighbours.said("host", forged, f"{forged} sent")
        wait_until(lambda n=before: dropped(place.site) == n + 3, f"{forged}: all three are dropped")  # type: ignore[misc]
    table = run("bridge", "fdb", "show", "br", "flt-br0", inside=place.site.host)
    tap = place.lives()[neighbours.vms["plain"]].placement["lease"]["tap"]
    assert {line.split()[2] for line in table.splitlines() if line.startswith(mac.lower())} <= {tap}
    assert opened(neighbours.said("plain", f"connect {OUTSIDE} {OPEN_PORT}", f"{OUTSIDE}:{OPEN_PORT}")), (
        "who was impersonated gets its answers"
    )


def dropped(site: NetworkSite) -> int:
    """Return how many frames of guests were no frames of theirs."""
    listing = json.loads(run("nft", "-j", "list", "chain", "bridge", "fleetlog", "port", inside=site.host))
    counters = [
        part["counter"]["packets"]
        for entry in listing["nftables"]
        for part in entry.get("rule", {}).get("expr", ())
        if "counter" in part
    ]
    return sum(counters)


def test_when_the_addresses_run_out_demand_is_told_so_and_gets_one_when_one_is_free() -> None:
    with network_site() as site:
        place = MicrovmPlace(site, network={"cidr": "10.44.0.0/29"})
        try:
            place.start()
            answers = place.answers("held", 7)
            assert [answer.kind for answer in answers] == ["spawning"] * 5 + ["at-capacity"] * 2
            assert "addresses" in answers[-1].message
            vms = [str(answer.vm) for answer in answers if answer.vm is not None]
            place.wait_phases(vms, "registered")
            freed = place.lives()[vms[2]].address
            place.tell(vms[2], "exit 0")
            place.wait_phase(vms[2], "reaped")
            (again,) = place.ask_for("held")
            place.wait_phase(again, "registered")
            assert place.lives()[again].address == freed
            for vm in (*vms, again):
                if vm != vms[2]:
                    place.tell(vm, "exit 0")
            place.settle()
        finally:
            place.clean()


def test_two_scalers_and_two_coordinators_on_one_host_never_touch_what_is_the_others() -> None:
    with network_site() as site:
        ours = MicrovmPlace(site)
        theirs = MicrovmPlace(
            site, base=ours.base, network={"cidr": "10.45.0.0/24", "bridge": "flt-br1", "nft_table": "other"}
        )
        try:
            both = [ours.scaler(kinds={"held": "wait"}), ours.scaler(kinds={"more": "wait"}, name="others")]
            ours.write(*both)
            first, second = ours.start(), theirs.start()
            mine = [*ours.ask_for("held"), *ours.ask_for("more")]
            other = theirs.ask_for("held", 2)
            ours.wait_phases(mine, "registered")
            theirs.wait_phases(other, "registered")
            assert {ours.lives()[vm].address for vm in mine} == {"10.44.0.2", "10.44.0.3"}
            assert sorted(ours.microvms().values()) == sorted(mine)
            assert sorted(theirs.microvms().values()) == sorted(other)
            before = (theirs.microvms(), theirs.policies(), theirs.taps(), theirs.chroots())

            first.kill()  # its next start reconciles the host, and looks at everything on it
            ours.start()
            ours.verify()
            theirs.verify()
            for vm in mine:
                ours.tell(vm, "exit 0")
            ours.settle()
            assert (theirs.microvms(), theirs.policies(), theirs.taps(), theirs.chroots()) == before
            assert {state.phase for state in theirs.lives().values()} == {"registered"}
            for vm in other:
                theirs.tell(vm, "exit 0")
            theirs.settle()
            assert second.process.returncode == 0
        finally:
            ours.clean()
            theirs.clean()

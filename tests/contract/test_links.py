"""Links: both adapters keep the same promises, in a namespace of the test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.decisions.addresses import AddressPool, Lease, lease_of
from actors.errors import DriverError
from infra.network.command_links import CommandLinks
from infra.network.commands import Commands
from infra.network.links import Bridge, Links
from infra.network.netlink_links import NetlinkLinks
from tests.network_site import namespace, need_network, run
from tests.tap_guest import TapGuest

BRIDGE = Bridge(
    name="flt-br0", gateway="10.44.0.1", prefix_length=16, mac="06:00:AC:2C:00:01", alias="fleetlog fleetlog"
)
POOL = AddressPool(aggregate="a", cidr="10.44.0.0/16", gateway="10.44.0.1", bridge="flt-br0")


def lease(number: int) -> Lease:
    return lease_of(POOL, f"10.44.{number // 250}.{number % 250 + 2}")


@pytest.fixture
def host() -> Iterator[Path]:
    need_network()
    with namespace() as path:
        yield path


@pytest.fixture(params=["netlink", "commands"])
def links(request: pytest.FixtureRequest, host: Path) -> Iterator[Links]:
    made: Links = NetlinkLinks(host) if request.param == "netlink" else CommandLinks(Commands(namespace=host))
    yield made
    made.close()


@pytest.fixture
def bridged(links: Links) -> Links:
    links.ensure_bridge(BRIDGE)
    return links


def test_a_bridge_is_made_once_and_found_as_made(links: Links, host: Path) -> None:
    assert links.bridge("flt-br0") is None
    links.ensure_bridge(BRIDGE)
    links.ensure_bridge(BRIDGE)
    state = links.bridge("flt-br0")
    assert state is not None
    assert (state.kind, state.alias, state.up) == ("bridge", "fleetlog fleetlog", True)
    assert state.mac == BRIDGE.mac
    assert state.addresses == ("10.44.0.1/16",)
    assert run("sysctl", "-n", "net.ipv6.conf.flt-br0.disable_ipv6", inside=host).strip() == "1"


def test_a_bridge_that_lost_its_address_gets_it_back(bridged: Links, host: Path) -> None:
    run("ip", "addr", "flush", "dev", "flt-br0", inside=host)
    run("ip", "link", "set", "flt-br0", "down", inside=host)
    bridged.ensure_bridge(BRIDGE)
    state = bridged.bridge("flt-br0")
    assert state is not None
    assert (state.up, state.addresses) == (True, ("10.44.0.1/16",))


@pytest.mark.parametrize("alias", [None, "fleetlog other"])
def test_a_bridge_of_somebody_else_is_neither_used_nor_removed(
    links: Links, host: Path, alias: str | None
) -> None:
    run("ip", "link", "add", "flt-br0", "type", "bridge", inside=host)
    if alias:
        run("ip", "link", "set", "flt-br0", "alias", alias, inside=host)
    for call in (links.ensure_bridge, links.remove_bridge):
        with pytest.raises(DriverError, match="flt-br0") as caught:
            call(BRIDGE)
        assert (caught.value.kind, caught.value.transient) == ("refused", False)
    state = links.bridge("flt-br0")
    assert state is not None
    assert state.addresses == ()


def test_an_attached_tap_is_isolated_taught_nothing_and_its_owners(bridged: Links, host: Path) -> None:
    bridged.attach(lease(0), 30000, 30001)
    (tap,) = bridged.taps()
    assert (tap.name, tap.address, tap.bridge) == ("flt-0a2c0002", "10.44.0.2", "flt-br0")
    assert (tap.up, tap.isolated, tap.learning, tap.flooding, tap.uid) == (True, True, False, False, 30000)
    shown = run("ip", "-d", "link", "show", tap.name, inside=host)
    assert "user 30000 group 30001" in shown
    assert "06:00:ac:2c:00:02 master flt-br0 static" in run(
        "bridge", "fdb", "show", "dev", tap.name, inside=host
    )
    assert "PERMANENT" in run("ip", "neigh", "show", "10.44.0.2", inside=host)
    assert run("sysctl", "-n", f"net.ipv6.conf.{tap.name}.disable_ipv6", inside=host).strip() == "1"
    assert bridged.ports("flt-br0") == 1


def test_a_parked_tap_is_taken_up_again_with_its_new_owner(bridged: Links) -> None:
    bridged.attach(lease(0), 30000, 30000)
    bridged.park(lease(0).tap)
    (parked,) = bridged.taps()
    assert (parked.up, parked.bridge) == (False, "flt-br0")
    bridged.attach(lease(0), 30007, 30007)
    (again,) = bridged.taps()
    assert (again.up, again.isolated, again.uid) == (True, True, 30007)
    assert bridged.ports("flt-br0") == 1


def test_a_parked_tap_that_lost_its_isolation_gets_it_back(bridged: Links, host: Path) -> None:
    bridged.attach(lease(0), 30000, 30000)
    bridged.park(lease(0).tap)
    port = ("isolated", "off", "learning", "on", "flood", "on")
    run("bridge", "link", "set", "dev", lease(0).tap, *port, inside=host)
    bridged.attach(lease(0), 30000, 30000)
    (tap,) = bridged.taps()
    assert (tap.isolated, tap.learning, tap.flooding) == (True, False, False)


def test_a_tap_that_a_process_still_has_open_is_not_given_to_another(bridged: Links, host: Path) -> None:
    bridged.attach(lease(0), 0, 0)
    with TapGuest(lease(0), host), pytest.raises(DriverError, match="still open") as caught:
        bridged.attach(lease(0), 30001, 30001)
    assert (caught.value.kind, caught.value.transient) == ("still-there", True)


def test_a_tap_in_use_is_put_back_as_it_was_after_its_bridge_was_made_again(
    bridged: Links, host: Path
) -> None:
    bridged.attach(lease(0), 0, 0)
    with TapGuest(lease(0), host) as guest:
        run("ip", "link", "del", "flt-br0", inside=host)
        with pytest.raises(DriverError, match="fleetlog host provision"):
            bridged.restore(lease(0))
        bridged.ensure_bridge(BRIDGE)
        bridged.restore(lease(0))
        bridged.restore(lease(0))
        (tap,) = bridged.taps()
        assert (tap.up, tap.bridge, tap.isolated, tap.learning, tap.flooding) == (
            True,
            "flt-br0",
            True,
            False,
            False,
        )
        assert "PERMANENT" in run("ip", "neigh", "show", lease(0).address, inside=host)
        guest.wait_for_the_bridge()
        assert guest.arp("10.44.0.1")
    with pytest.raises(DriverError, match="not there") as caught:
        bridged.restore(lease(1))
    assert caught.value.kind == "missing"


def test_deleting_and_parking_what_is_not_there_is_fine(bridged: Links) -> None:
    bridged.attach(lease(0), 30000, 30000)
    bridged.delete(lease(0).tap)
    bridged.delete(lease(0).tap)
    bridged.park(lease(0).tap)
    assert bridged.taps() == []


@pytest.mark.parametrize("name", ["flt-br0", "lo", "flt-0A2C0002", "eth0"])
def test_only_taps_of_ours_are_ever_taken_down_or_removed(bridged: Links, name: str) -> None:
    for call in (bridged.delete, bridged.park):
        with pytest.raises(DriverError, match="not have the name"):
            call(name)
    assert bridged.bridge("flt-br0") is not None


def test_a_link_that_only_has_a_taps_name_is_left_alone(bridged: Links, host: Path) -> None:
    run("ip", "link", "add", "flt-0a2c0002", "type", "bridge", inside=host)
    with pytest.raises(DriverError, match="not a TAP"):
        bridged.delete("flt-0a2c0002")
    with pytest.raises(DriverError, match="another kind"):
        bridged.attach(lease(0), 0, 0)
    assert bridged.taps() == []
    assert bridged.bridge("flt-0a2c0002") is not None


def test_without_a_bridge_no_tap_is_made(links: Links) -> None:
    with pytest.raises(DriverError, match="fleetlog host provision") as caught:
        links.attach(lease(0), 30000, 30000)
    assert caught.value.kind == "missing"
    assert links.taps() == []


def test_a_host_says_which_networks_it_has_and_where_it_leaves(links: Links, host: Path) -> None:
    assert links.egress() is None
    run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1", inside=host)
    run("ip", "addr", "add", "192.168.7.2/24", "dev", "up0", inside=host)
    run("ip", "link", "set", "up0", "up", inside=host)
    run("ip", "link", "set", "up1", "up", inside=host)
    run("ip", "route", "add", "default", "via", "192.168.7.1", "metric", "50", inside=host)
    run("ip", "route", "add", "10.44.9.0/24", "via", "192.168.7.1", inside=host)
    run("ip", "route", "add", "blackhole", "10.45.0.0/16", inside=host)
    assert links.egress() == "up0"
    found = {(claim.interface, claim.network, claim.route) for claim in links.claims()}
    assert {("up0", "192.168.7.2/24", False), ("up0", "10.44.9.0/24", True)} <= found
    assert not any(claim.network.startswith("10.45.") for claim in links.claims())


def test_removing_the_bridge_removes_no_tap(bridged: Links) -> None:
    bridged.attach(lease(0), 30000, 30000)
    bridged.remove_bridge(BRIDGE)
    bridged.remove_bridge(BRIDGE)
    (tap,) = bridged.taps()
    assert tap.bridge is None


def test_three_hundred_taps_are_all_isolated(host: Path) -> None:
    links = NetlinkLinks(host)
    links.ensure_bridge(BRIDGE)
    for number in range(300):
        links.attach(lease(number), 30000 + number, 30000)
    taps = links.taps()
    assert len(taps) == links.ports("flt-br0") == 300
    assert all(tap.up and tap.isolated and not tap.learning and not tap.flooding for tap in taps)
    assert {tap.uid for tap in taps} == set(range(30000, 30300))
    seen = CommandLinks(Commands(namespace=host)).taps()
    assert sorted(tap.name for tap in seen) == sorted(tap.name for tap in taps)
    links.close()


def test_a_full_bridge_says_so_and_leaves_no_tap_behind(host: Path) -> None:
    links = NetlinkLinks(host)
    links.ensure_bridge(BRIDGE)
    for number in range(1023):
        links.attach(lease(number), 0, 0)
    with pytest.raises(DriverError, match="1023 ports") as caught:
        links.attach(lease(1023), 0, 0)
    assert (caught.value.kind, caught.value.transient) == ("exhausted", True)
    assert links.ports("flt-br0") == len(links.taps()) == 1023
    with pytest.raises(DriverError, match="1023 ports"):
        CommandLinks(Commands(namespace=host)).attach(lease(1024), 0, 0)
    assert len(links.taps()) == 1023
    links.close()

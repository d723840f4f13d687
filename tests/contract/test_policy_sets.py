"""Policy sets: both adapters exchange an address's elements as a whole, against the kernel's real sets."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.decisions.addresses import AddressPool, Lease, lease_of
from actors.errors import DriverError
from infra.network.command_sets import CommandSets
from infra.network.commands import Commands
from infra.network.netlink_sets import NetlinkSets
from infra.network.nft import Nft
from infra.network.policy import Policy, elements
from infra.network.policy_sets import PolicySets
from infra.network.rules import Site, provision_script
from tests.network_site import namespace, need_network, run

SITE = Site(table="fleetlog", bridge="flt-br0", subnet="10.44.0.0/20", gateway="10.44.0.1", egress="up0")
POOL = AddressPool(aggregate="a", cidr="10.44.0.0/20", gateway="10.44.0.1", bridge="flt-br0")
FULL = Policy(
    allowlist=("10.9.0.0/24", "10.9.0.0/25", "192.0.2.7/32", "64.0.0.0/2"),
    deny_all=True,
    host_access=("10.44.0.1:53", "4222", "*:4222", "10.44.0.1", "10.44.0.0/31", "198.51.100.0/24"),
)


def lease(number: int) -> Lease:
    return lease_of(POOL, str(POOL.network[number]))


def wanted(number: int, policy: Policy = FULL) -> frozenset[object]:
    return frozenset(elements(lease(number), policy))


def nft(host: Path) -> Nft:
    return Nft(commands=Commands(namespace=host))


@pytest.fixture
def host() -> Iterator[Path]:
    need_network()
    with namespace() as path:
        yield path


@pytest.fixture(params=["netlink", "commands"])
def sets(request: pytest.FixtureRequest, host: Path) -> Iterator[PolicySets]:
    made = sets_of(request.param, host)
    yield made
    made.close()


def sets_of(kind: str, host: Path) -> PolicySets:
    return NetlinkSets("fleetlog", host) if kind == "netlink" else CommandSets(nft(host), "fleetlog")


@pytest.fixture
def table(host: Path) -> None:
    nft(host).apply(provision_script(SITE, ()))


@pytest.mark.usefixtures("table")
def test_what_is_put_is_held_as_nft_itself_sees_it(sets: PolicySets, host: Path) -> None:
    assert sets.held() == {}
    sets.put("10.44.0.2", elements(lease(2), FULL))
    sets.put("10.44.0.20", elements(lease(20), Policy()))
    assert sets.held() == {"10.44.0.2": wanted(2), "10.44.0.20": wanted(20, Policy())}
    listed = " ".join(run("nft", "list", "ruleset", inside=host).split())
    for expected in (
        "elements = { 10.44.0.2, 10.44.0.20 }",
        "10.44.0.2 . 10.9.0.0/24",
        "10.44.0.2 . 192.0.2.7",
        "10.44.0.2 . 0.0.0.0/0 . tcp . 4222",
        "10.44.0.2 . 10.44.0.1 . udp . 53",
        "10.44.0.2 . 10.44.0.0/31",
        '"flt-0a2c0002" . 06:00:ac:2c:00:02 . 10.44.0.2',
    ):
        assert expected in listed


@pytest.mark.usefixtures("table")
def test_both_adapters_read_what_either_wrote(host: Path) -> None:
    kinds = ("netlink", "commands")
    made = {kind: sets_of(kind, host) for kind in kinds}
    for number, kind in enumerate(kinds, 2):
        made[kind].put(str(POOL.network[number]), elements(lease(number), FULL))
    assert (
        made["netlink"].held() == made["commands"].held() == {"10.44.0.2": wanted(2), "10.44.0.3": wanted(3)}
    )
    for each in made.values():
        each.close()


@pytest.mark.usefixtures("table")
def test_a_new_policy_replaces_all_of_the_old_one_and_nothing_of_others(sets: PolicySets) -> None:
    sets.put("10.44.0.2", elements(lease(2), FULL))
    sets.put("10.44.0.20", elements(lease(20), FULL))
    narrow = Policy(allowlist=("10.9.0.0/25",), host_access=("53",))
    for _ in range(2):
        sets.put("10.44.0.2", elements(lease(2), narrow))
        assert sets.held() == {"10.44.0.2": wanted(2, narrow), "10.44.0.20": wanted(20)}
    sets.drop("10.44.0.2")
    sets.drop("10.44.0.2")
    assert sets.held() == {"10.44.0.20": wanted(20)}


@pytest.mark.usefixtures("table")
def test_what_others_left_for_the_address_goes_in_the_same_step(sets: PolicySets, host: Path) -> None:
    sets.put("10.44.0.2", elements(lease(2), Policy()))
    run("nft", "add element inet fleetlog allowed { 10.44.0.2 . 10.1.0.0/16 }", inside=host)
    run("nft", "add element inet fleetlog host_ports { 10.44.0.2 . 10.44.0.1 . tcp . 22 }", inside=host)
    run("nft", "add element inet fleetlog allowed { 10.44.0.3 . 10.1.0.0-10.1.0.9 }", inside=host)
    sets.put("10.44.0.2", elements(lease(2), Policy()))
    held = sets.held()
    assert held["10.44.0.2"] == wanted(2, Policy())
    assert "10.44.0.3" in held
    sets.drop("10.44.0.3")
    assert "10.44.0.3" not in sets.held()


@pytest.mark.usefixtures("table")
def test_what_others_took_away_is_put_back(sets: PolicySets, host: Path) -> None:
    sets.put("10.44.0.2", elements(lease(2), FULL))
    run("nft", "flush set inet fleetlog known", inside=host)
    run("nft", "delete element inet fleetlog allowed { 10.44.0.2 . 10.9.0.0/24 }", inside=host)
    sets.put("10.44.0.2", elements(lease(2), FULL))
    assert sets.held() == {"10.44.0.2": wanted(2)}
    run("nft", "flush set inet fleetlog known", inside=host)
    sets.drop("10.44.0.2")
    assert sets.held() == {}


def test_without_the_table_putting_is_refused_and_dropping_is_done(sets: PolicySets) -> None:
    with pytest.raises(DriverError, match="fleetlog host provision") as caught:
        sets.put("10.44.0.2", elements(lease(2), FULL))
    assert (caught.value.kind, caught.value.transient) == ("missing", True)
    with pytest.raises(DriverError, match="fleetlog host provision"):
        sets.held()
    sets.drop("10.44.0.2")


@pytest.mark.usefixtures("table")
def test_a_put_that_fails_leaves_what_was_there(sets: PolicySets, host: Path) -> None:
    narrow = Policy(allowlist=("10.9.0.0/25",))
    sets.put("10.44.0.2", elements(lease(2), narrow))
    run("nft", "flush chain inet fleetlog leaving; delete set inet fleetlog denied", inside=host)
    with pytest.raises(DriverError, match="fleetlog host provision"):
        sets.put("10.44.0.2", elements(lease(2), FULL))
    nft(host).apply(provision_script(SITE, ()))
    assert sets.held() == {"10.44.0.2": wanted(2, narrow)}


@pytest.mark.usefixtures("table")
def test_a_long_allowlist_is_put_whole(sets: PolicySets) -> None:
    long = Policy(allowlist=tuple(f"10.{a}.{b}.0/25" for a in range(4) for b in range(250)))
    sets.put("10.44.0.2", elements(lease(2), long))
    assert len(sets.held()["10.44.0.2"]) == 1002
    sets.drop("10.44.0.2")
    assert sets.held() == {}


@pytest.mark.usefixtures("table")
def test_several_writers_and_a_stranger_lose_nothing(host: Path) -> None:
    writers = [NetlinkSets("fleetlog", host) for _ in range(3)]
    errors: list[BaseException] = []

    def work(sets: NetlinkSets, numbers: range) -> None:
        try:
            for number in numbers:
                address = str(POOL.network[number])
                sets.put(address, elements(lease(number), FULL))
                if number % 3 == 0:
                    sets.drop(address)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(sets, range(start, start + 40)))
        for sets, start in zip((*writers, writers[0]), (10, 60, 110, 160), strict=True)
    ]
    for thread in threads:
        thread.start()
    for _ in range(10):
        run("nft", "add table ip stranger; delete table ip stranger", inside=host)
    for thread in threads:
        thread.join()
    assert errors == []
    numbers = [n for start in (10, 60, 110, 160) for n in range(start, start + 40) if n % 3]
    assert writers[1].held() == {str(POOL.network[n]): wanted(n) for n in numbers}
    for each in writers:
        each.close()

"""Policies as set elements, and the constant rules as text: by the vectors, without a kernel."""

import ipaddress
import re

import pytest

from actors.decisions.addresses import AddressPool, lease_of, tap_of
from infra.network.policy import SETS, Policy, default_host_access, element_text, elements, owner
from infra.network.rules import Site, chains, provision_script, tap_globs

POOL = AddressPool(aggregate="a", cidr="10.44.0.0/24", gateway="10.44.0.1", bridge="flt-br0")
SITE = Site(table="fleetlog", bridge="flt-br0", subnet="10.44.0.0/24", gateway="10.44.0.1", egress="eth0")


def texts(policy: Policy, address: str = "10.44.0.2") -> set[tuple[str, str]]:
    return {(each.set, element_text(each)) for each in elements(lease_of(POOL, address), policy)}


ALWAYS = {("known", "10.44.0.2"), ("bound", '"flt-0a2c0002" . 06:00:ac:2c:00:02 . 10.44.0.2')}


def test_a_policy_that_says_nothing_only_makes_the_address_known() -> None:
    assert texts(Policy()) == ALWAYS
    assert texts(Policy(deny_all=True)) == ALWAYS | {("denied", "10.44.0.2")}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("4000", {("host_ports", "10.44.0.2 . 0.0.0.0-255.255.255.255 . {} . 4000")}),
        ("*:4000", {("host_ports", "10.44.0.2 . 0.0.0.0-255.255.255.255 . {} . 4000")}),
        ("10.0.0.1:53", {("host_ports", "10.44.0.2 . 10.0.0.1 . {} . 53")}),
        ("10.2.0.0/16", {("host", "10.44.0.2 . 10.2.0.0-10.2.255.255")}),
        ("*", {("host", "10.44.0.2 . 0.0.0.0-255.255.255.255")}),
        ("*:*", {("host", "10.44.0.2 . 0.0.0.0-255.255.255.255")}),
    ],
)
def test_an_entry_with_a_port_is_tcp_and_udp_and_one_without_is_everything(
    entry: str, expected: set[tuple[str, str]]
) -> None:
    both = {(name, text.format(number)) for name, text in expected for number in (6, 17)}
    assert texts(Policy(host_access=(entry,))) == ALWAYS | both


def test_networks_that_overlap_become_one_range_since_the_kernel_takes_no_overlap() -> None:
    policy = Policy(
        allowlist=("10.9.0.0/24", "10.9.0.0/16", "10.10.0.0/16", "10.9.3.4/32"),
        host_access=("53", "10.44.0.1:53", "10.44.0.1", "10.44.0.1"),
    )
    assert {text for name, text in texts(policy) if name == "allowed"} == {
        "10.44.0.2 . 10.9.0.0-10.9.255.255",
        "10.44.0.2 . 10.10.0.0-10.10.255.255",
    }
    assert len([name for name, _ in texts(policy) if name == "host_ports"]) == 2
    assert len([name for name, _ in texts(policy) if name == "host"]) == 1


def test_every_element_says_whose_it_is() -> None:
    policy = Policy(allowlist=("0.0.0.0/0",), deny_all=True, host_access=("*", "53"))
    for address in ("10.44.0.2", "10.44.0.20"):
        found = elements(lease_of(POOL, address), policy)
        assert {owner(each) for each in found} == {address}
        assert {each.set for each in found} == {each.name for each in SETS}


@pytest.mark.parametrize("entry", ["db.lan:5432", "1.2.3.400", "10.0.0.0/33", ":0", "*:70000", ""])
def test_an_entry_of_another_form_is_never_a_rule(entry: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        texts(Policy(host_access=(entry,)))


@pytest.mark.parametrize(
    "cidr", ["10.44.0.0/24", "10.44.0.0/30", "10.44.0.8/29", "10.40.0.0/22", "10.0.0.0/16"]
)
def test_tap_patterns_fit_the_networks_taps_and_no_neighbours(cidr: str) -> None:
    network = ipaddress.IPv4Network(cidr)
    patterns = [re.compile(re.escape(glob[:-1]) + ".*") for glob in tap_globs(cidr)]

    def fits(address: ipaddress.IPv4Address) -> bool:
        return any(pattern.fullmatch(tap_of(str(address))) for pattern in patterns)

    inside = [network[0], network[1], network[-1], network[len(list(range(network.num_addresses))) // 2]]
    assert all(fits(address) for address in inside)
    assert not fits(network[0] - 1)
    assert not fits(network[-1] + 1)


@pytest.mark.parametrize(
    ("nats_url", "expected"),
    [
        ("nats://10.0.0.1:4333", ("10.0.0.1:53", "*:4333")),
        ("tls://ci.example", ("10.0.0.1:53", "*:4222")),
        ("nats://ci.example:4222", ("10.0.0.1:53", "*:4222")),
        ("nats://ci.example:99999", ("10.0.0.1:53",)),
        ("https://ci.example", ("10.0.0.1:53",)),
        ("", ("10.0.0.1:53",)),
    ],
)
def test_by_default_dns_and_nats_are_reached_on_the_host(nats_url: str, expected: tuple[str, ...]) -> None:
    access = default_host_access("10.0.0.1", nats_url)
    assert access == expected
    assert texts(Policy(host_access=access)) > ALWAYS


def test_the_order_of_what_a_machine_may_reach_through_the_host() -> None:
    leaving = next(chain.rules for chain in chains(SITE) if chain.name == "leaving")
    landmarks = [
        "!= @known drop",
        "10.44.0.1 accept",
        "@allowed accept",
        "10.0.0.0/8",
        "169.254",
        "@denied",
        "baseline",
    ]
    places = [next(index for index, rule in enumerate(leaving) if mark in rule) for mark in landmarks]
    assert places == sorted(places)
    assert leaving[-1] == "jump baseline"


def test_the_rules_name_no_machine_whatever_machines_there_are() -> None:
    script = provision_script(SITE, ())
    assert "10.44.0.2" not in script
    assert not re.search(r"^(delete|flush) (table|set|ruleset)", script, re.MULTILINE)


def test_every_rule_is_the_tables_own_and_speaks_of_the_bridge_subnet_or_sets() -> None:
    other = Site(table="b", bridge="flt-br1", subnet="10.45.0.0/24", gateway="10.45.0.1", egress=None)
    script = provision_script(other, [("inet", "forward", 7)])
    for word in ("fleetlog ", "flt-br0", "10.44."):
        assert word not in re.sub(r'comment ".*"', "", script)
    assert "delete rule inet b forward handle 7" in script
    hooked = {chain.name: chain for chain in chains(other) if chain.hook}
    for chain in hooked.values():
        for rule in chain.rules:
            assert re.search(r"flt-br1|10\.45\.0\.0/24|flt-0a2d00\*", rule), f"{chain.name}: {rule}"
    assert not any("accept" in rule for rule in next(c.rules for c in chains(other) if c.name == "baseline"))


def test_a_rule_that_says_something_else_has_another_comment() -> None:
    moved = Site(
        table="fleetlog", bridge="flt-br0", subnet="10.44.0.0/24", gateway="10.44.0.1", egress="eth1"
    )
    before = {chain.name: chain.comments() for chain in chains(SITE)}
    after = {chain.name: chain.comments() for chain in chains(moved)}
    assert [name for name in before if before[name] != after[name]] == ["baseline"]
    assert all(len(comment) < 100 for comments in before.values() for comment in comments)

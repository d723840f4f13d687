"""The `microvm_network` block: its defaults, what follows from a part of it, and what is refused."""

from pathlib import Path

import pytest

from infra.config.fleet import FleetConfig
from infra.config.load import check, load
from infra.config.microvm_network import MicrovmNetwork


def read(tmp_path: Path, block: str) -> FleetConfig:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"version: 1\nmicrovm_network: {block}\nscalers: []\n")
    return load(file)


def test_without_a_block_the_default_holds(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("version: 1\nscalers: []\n")
    network = load(file).microvm_network
    assert network == MicrovmNetwork() == read(tmp_path, "{}").microvm_network
    assert (network.cidr, network.gateway, network.netmask) == ("10.44.0.0/24", "10.44.0.1", "255.255.255.0")
    assert (network.bridge, network.nft_table, network.auto_provision_host) == ("flt-br0", "fleetlog", True)
    assert network.interface_glob == "flt-*"


@pytest.mark.parametrize(
    ("cidr", "gateway", "netmask", "prefix_length"),
    [
        ("10.0.0.0/24", "10.0.0.1", "255.255.255.0", 24),
        ("10.0.0.0/22", "10.0.0.1", "255.255.252.0", 22),
        ("192.168.100.0/28", "192.168.100.1", "255.255.255.240", 28),
        ("10.1.0.0/20", "10.1.0.1", "255.255.240.0", 20),
    ],
)
def test_gateway_and_netmask_follow_from_the_cidr(
    tmp_path: Path, cidr: str, gateway: str, netmask: str, prefix_length: int
) -> None:
    network = read(tmp_path, f"{{cidr: {cidr}}}").microvm_network
    assert (network.gateway, network.netmask, network.prefix_length) == (gateway, netmask, prefix_length)
    assert read(tmp_path, f"{{cidr: {cidr}, netmask: {netmask}}}").microvm_network == network


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("{gateway: 10.45.0.1}", "gateway 10.45.0.1 is not an address for a host in 10.44.0.0/24"),
        ("{gateway: 10.44.0.0}", "gateway 10.44.0.0 is not an address for a host"),
        ("{gateway: 10.44.0.255}", "gateway 10.44.0.255 is not an address for a host"),
        ("{netmask: 255.255.0.0}", "netmask 255.255.0.0 is not that of 10.44.0.0/24, 255.255.255.0"),
        ("{cidr: 10.44.0.0/31}", "not a network of /16 to /30"),
        ("{cidr: 10.0.0.0/8}", "not a network of /16 to /30"),
        ("{cidr: 10.44.0.1/24}", "not an IPv4 network"),
        ("{gateway: gate.lan}", "not an IPv4 address"),
        ("{bridge: a-bridge-with-a-long-name}", "1 to 15"),
        ("{bridge: 'flt br0'}", "1 to 15"),
        ("{bridge: '$(reboot)'}", "1 to 15"),
        ("{nft_table: 'fleetlog; flush ruleset'}", "name of an nft table"),
        ("{egress_interface: 'eth0; reboot'}", "name of an interface"),
        ("{auto_provision_host: yes please}", "true or false"),
        ("{idle_taps: 1024}", "0 to 1023"),
        ("{bridgeName: kici-br0}", "unknown key"),
    ],
)
def test_a_block_whose_parts_do_not_fit_is_refused_with_its_place(
    tmp_path: Path, block: str, told: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"version: 1\nmicrovm_network: {block}\nscalers: []\n")
    report = check(file)
    assert report.config is None
    (problem,) = report.problems
    assert told in str(problem)
    assert "fleet.yaml:2 microvm_network" in str(problem)

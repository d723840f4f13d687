"""`fleetlog host`: the real command line in a namespace of its own, and the boot script it leaves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.config.microvm_network import MicrovmNetwork
from infra.network.host import HostNetwork
from infra.network.policy import Policy
from infra.network.settings_files import boot_script
from tests.network_site import OUTSIDE, NetworkSite, network_site, run
from tests.tap_guest import ICMP, TCP, UDP

ODD = MicrovmNetwork(bridge="flt-br7", cidr="10.77.0.0/22", gateway="10.77.0.1", nft_table="t7")


@pytest.fixture
def site() -> Iterator[NetworkSite]:
    with network_site() as lent:
        yield lent


def fleetlog(site: NetworkSite, *arguments: str) -> tuple[int, str, str]:
    """Run it in the host's namespace; return its exit code, stdout and stderr."""
    command = ["nsenter", f"--net={site.host}", sys.executable, "-m", "infra.cli.main", "host", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    return done.returncode, done.stdout, done.stderr


def test_provision_verify_and_teardown_by_their_exit_codes(site: NetworkSite) -> None:
    code, out, err = fleetlog(site, "verify")
    assert (code, "bridge flt-br0 is not there" in out, "fleetlog host provision" in err) == (1, True, True)
    for _ in range(2):
        assert fleetlog(site, "provision") == (0, "flt-br0 (10.44.0.0/24, nft table fleetlog): ready\n", "")
    assert fleetlog(site, "verify")[0] == 0
    for _ in range(2):
        assert fleetlog(site, "teardown")[:2] == (0, "flt-br0 (10.44.0.0/24): removed\n")
    assert site.rules() == ""


def test_json_names_every_miss(site: NetworkSite) -> None:
    fleetlog(site, "provision")
    run("nft", "flush", "chain", "inet", "fleetlog", "postrouting", inside=site.host)
    code, out, _ = fleetlog(site, "verify", "--json")
    answer = json.loads(out)
    assert (code, answer["healthy"], answer["bridge"]) == (1, False, "flt-br0")
    (miss,) = answer["misses"]
    assert "postrouting lacks its rule 0" in miss
    code, out, _ = fleetlog(site, "provision", "--json")
    assert (code, json.loads(out)["healthy"]) == (0, True)


def test_the_fleet_file_says_which_network_and_options_say_it_better(
    site: NetworkSite, tmp_path: Path
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "version: 1\nmicrovm_network: {cidr: 10.50.0.0/24, bridge: flt-br5, nft_table: t5}\nscalers: []\n"
    )
    assert (
        fleetlog(site, "provision", "--config", str(file))[1]
        == "flt-br5 (10.50.0.0/24, nft table t5): ready\n"
    )
    other = ("--config", str(file), "--cidr", "10.51.0.0/24", "--bridge", "flt-br6", "--nft-table", "t6")
    assert fleetlog(site, "provision", *other)[1] == "flt-br6 (10.51.0.0/24, nft table t6): ready\n"
    assert "10.51.0.1/24" in run("ip", "addr", "show", "flt-br6", inside=site.host)
    assert fleetlog(site, "verify", "--config", str(file))[0] == 0
    assert fleetlog(site, "provision", "--cidr", "10.44.0.0/8")[0] == 2
    assert fleetlog(site, "provision", "--nft-table", "x; flush ruleset")[0] == 2


def test_what_is_somebody_elses_is_refused_with_the_way_out(site: NetworkSite) -> None:
    run("ip", "link", "add", "flt-br0", "type", "bridge", inside=site.host)
    for command in ("provision", "teardown"):
        code, out, err = fleetlog(site, command)
        assert (code, out) == (1, "")
        assert "fleetlog did not make" in err
        assert "microvm_network.bridge" in err
        assert "Traceback" not in err


def test_machines_that_run_keep_their_network_unless_forced(site: NetworkSite, tmp_path: Path) -> None:
    fleetlog(site, "provision")
    site.guest(site.network(tmp_path), 2, Policy())
    code, _, err = fleetlog(site, "teardown")
    assert (code, "1 machines use this network (flt-0a2c0002)" in err) == (1, True)
    assert fleetlog(site, "verify")[0] == 0
    assert fleetlog(site, "teardown", "--force")[0] == 0
    assert "flt-0" not in run("ip", "link", inside=site.host)


def test_the_boot_script_alone_brings_the_network_back(site: NetworkSite, tmp_path: Path) -> None:
    fleetlog(site, "provision", "--persist", "--etc", str(tmp_path))
    fleetlog(site, "teardown")
    run("sysctl", "-qw", "net.ipv4.ip_forward=0", inside=site.host)
    script = tmp_path / "fleetlog" / "fleetlog-network-flt-br0.sh"
    run("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", str(script), inside=site.host)
    network = site.network(tmp_path)
    assert network.verify().misses == ()
    guest = site.guest(network, 2, Policy())
    held, rules = network.sets.held(), site.rules()
    run(str(script), inside=site.host)
    assert (network.sets.held(), site.rules()) == (held, rules)
    assert guest.ask_all((UDP, TCP, ICMP), OUTSIDE, 7000) == {UDP, TCP, ICMP}


def test_the_unit_is_enabled_and_removed_again(site: NetworkSite, tmp_path: Path) -> None:
    system = tmp_path / "systemd" / "system"
    name = "fleetlog-network-flt-br0.service"
    for _ in range(2):
        assert fleetlog(site, "provision", "--persist", "--etc", str(tmp_path))[0] == 0
    assert (system / "multi-user.target.wants" / name).resolve() == system / name
    unit = (system / name).read_text()
    assert "Type=oneshot" in unit
    assert f'ExecStart="{tmp_path}/fleetlog/fleetlog-network-flt-br0.sh"' in unit
    assert fleetlog(site, "teardown", "--persist", "--etc", str(tmp_path))[0] == 0
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_the_boot_script_waits_for_a_way_out_and_quotes_what_it_is_given(tmp_path: Path) -> None:
    with HostNetwork(ODD, etc=tmp_path) as network:
        script = boot_script(network.parts)
    assert "ip -4 route show default" in script
    assert "ip link set dev flt-br7 alias 'fleetlog t7'" in script
    assert "10.77.0.1/22" in script
    checked = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "<<'END_OF_RULES'" in script, "the shell expands nothing in the rules, no glob and no variable"


def test_networkmanager_is_told_to_keep_off_where_there_is_one(site: NetworkSite, tmp_path: Path) -> None:
    network = site.network(tmp_path)
    network.provision()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "NetworkManager").mkdir()
    network.provision()
    (file,) = (tmp_path / "NetworkManager" / "conf.d").iterdir()
    assert file.read_text() == "[keyfile]\nunmanaged-devices+=interface-name:flt-*\n"
    network.teardown()
    assert file.exists()

"""The fleet file's Firecracker keys: what is needed, what is refused, and what reaches the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.config.extra_hosts import parse_entry
from infra.config.firecracker import FirecrackerScaler
from infra.config.load import check, load
from infra.drivers.catalogue import firecracker_config
from infra.network.policy import Policy, default_host_access
from tests.unit.fleet_files import fleet, lines, only

REQUIRED = {
    "firecracker_path": "/opt/fc/firecracker",
    "jailer_path": "/opt/fc/jailer",
    "kernel_path": "/opt/fc/vmlinux",
    "uid": "21000",
    "gid": "21000",
}


def microvm(more: str = "", in_set: str = "", **changes: str | None) -> str:
    keys = {**REQUIRED, **changes}
    said = "".join(f"    {key}: {value}\n" for key, value in keys.items() if value is not None)
    return f"""\
  - name: vms
    backend: firecracker
    max_agents: 2
{said}{more}    label_sets:
      - labels: [linux, vm]
        rootfs_path: /opt/fc/rootfs.ext4
{in_set}"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet(text))
    return path


def scaler(path: Path) -> FirecrackerScaler:
    found = load(path).scalers[0]
    assert isinstance(found, FirecrackerScaler)
    return found


def test_what_is_not_said_has_its_default(tmp_path: Path) -> None:
    found = scaler(write(tmp_path, microvm()))
    assert (found.chroot_base, found.vcpus, found.mem_mib, found.use_sudo) == ("/srv/jailer", 2, 512, False)
    assert found.label_sets[0].overlay_mib == 2048


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_required_key_that_is_missing_is_named_with_its_scaler(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, microvm("", "", **{key: None}))
    assert f"scalers[0].{key} (scaler vms): missing" in only(check(path), path)


def test_a_label_set_needs_its_root_file_system(tmp_path: Path) -> None:
    path = write(tmp_path, microvm().replace("        rootfs_path: /opt/fc/rootfs.ext4\n", ""))
    assert "scalers[0].label_sets[0].rootfs_path (scaler vms): missing" in only(check(path), path)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"firecracker_path": "/opt/fc/firecracker-1.12"}, 'the file is called "firecracker-1.12"'),
        ({"firecracker_path": "firecracker"}, "an absolute path"),
        ({"chroot_base": "/" + "x" * 60}, "the kernel takes 107"),
        ({"uid": "0"}, "a jailed root would be none"),
        ({"vcpus": "33"}, "vcpus"),
        ({"mem_mib": "0"}, "mem_mib"),
        ({"extra_hosts": '["mirror.lan"]'}, "no colon"),
        ({"extra_hosts": '["-x:10.0.0.1"]'}, "not a host name"),
        ({"extra_hosts": '["x:somewhere"]'}, "neither an IP address nor host-gateway"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_the_load(
    tmp_path: Path, changes: dict[str, str], wrong: str
) -> None:
    path = write(tmp_path, microvm(**changes))
    assert wrong in only(check(path), path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mirror.lan:host-gateway", ("mirror.lan", "host-gateway")),
        ("a:10.0.0.1", ("a", "10.0.0.1")),
        ("a-b.c:2001:db8::1", ("a-b.c", "2001:db8::1")),
    ],
)
def test_extra_hosts_name_a_host_and_an_address(text: str, expected: tuple[str, str]) -> None:
    assert parse_entry(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":1.2.3.4", "a.:1.2.3.4", "a_b:1.2.3.4", "a:fe80::1%eth0", "a:", "a b:1.1.1.1"]
)
def test_other_extra_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\""):
        parse_entry(text)


def test_an_environment_name_that_is_none_is_refused_and_no_value_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path, microvm(in_set='        env: {"BAD/KEY": hunter2}\n'))
    said = "\n".join(lines(check(path), path))
    assert "BAD/KEY" in said
    assert "hunter2" not in said
    good = scaler(write(tmp_path, microvm(in_set="        env: {KEY: hunter2}\n")))
    assert "hunter2" not in repr(good)


def test_the_driver_gets_what_the_file_says(tmp_path: Path) -> None:
    text = microvm(
        "    extra_hosts: [mirror.lan:host-gateway]\n",
        "        vcpus: 4\n        env: {A: b}\n"
        "        network_policy: {allowlist: [10.9.0.0/24], host_access: []}\n",
    )
    made = firecracker_config(
        scaler(write(tmp_path, text)),
        owner="c-1",
        state=tmp_path,
        environment={"FLEETLOG_AGENT_ENV_HTTP_PROXY": "x", "FLEETLOG_AGENT_ENV_": "y", "PATH": "z"},
        host_access=("*:4222",),
    )
    assert made.forwarded == {"HTTP_PROXY": "x"}
    assert made.extra_hosts == ("mirror.lan:host-gateway",)
    (label_set,) = made.label_sets
    assert (label_set.vcpus, label_set.env) == (4, {"A": "b"})
    assert label_set.policy == Policy(allowlist=("10.9.0.0/24",), host_access=())
    assert "b'" not in repr(made)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://10.0.0.1:4000", ("10.0.0.1:53", "*:4000")),
        ("tls://nats.example", ("10.0.0.1:53", "*:4222")),
    ],
)
def test_a_machine_reaches_dns_and_nats_of_its_host_by_default(url: str, expected: tuple[str, ...]) -> None:
    assert default_host_access("10.0.0.1", url) == expected

"""Paths, metadata, sizes, limits, images, overlays, consoles and the disk guard of microVMs."""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.decisions.addresses import Lease
from actors.errors import DriverError
from events.envelope import Resources
from infra.drivers.firecracker import (
    boot_failure,
    console,
    images,
    jailer,
    limits,
    machine,
    metadata,
    overlay,
    paths,
)
from infra.drivers.firecracker.config import FirecrackerConfig, LabelSet
from infra.drivers.firecracker.disk_guard import FREE_BYTES_LEAST, guard
from infra.drivers.firecracker.limits import Cgroups
from infra.drivers.firecracker.machine import Size
from infra.host_process.cgroup import Mount

NEVER = threading.Event()
MIB = 1024 * 1024
LEASE = Lease(
    address="10.44.0.9",
    gateway="10.44.0.1",
    netmask="255.255.255.0",
    prefix_length=24,
    mac="06:00:AC:2C:00:09",
    tap="flt-0a2c0009",
    bridge="flt-br0",
)
SET = LabelSet(labels=("linux",), rootfs_path="/r")
CONFIG = FirecrackerConfig(
    owner="c-1",
    state_dir="/s",
    firecracker_path="/bin/firecracker",
    jailer_path="/bin/jailer",
    kernel_path="/k",
    uid=30000,
    gid=30001,
    label_sets=(SET,),
)

# paths


def test_the_files_of_a_machine_are_where_the_jailer_puts_them() -> None:
    found = paths.of("/srv/jailer", "a-1")
    assert str(found.chroot) == "/srv/jailer/firecracker/a-1/root"
    assert str(found.socket) == "/srv/jailer/firecracker/a-1/root/run/api.sock"
    assert str(found.pid_file) == "/srv/jailer/firecracker/a-1/root/firecracker.pid"
    assert (
        str(paths.template("/srv/jailer", 64))
        == "/srv/jailer/firecracker/.overlay-templates/overlay-64mib.ext4"
    )


@pytest.mark.parametrize("vm", ["a/b", "x/../other", ".", "..", "", "A", "a_b", "a" * 65, "-a", "a\n"])
def test_what_is_no_single_segment_is_no_machine(vm: str) -> None:
    assert not paths.is_vm(vm)
    with pytest.raises(DriverError, match="no VM id") as caught:
        paths.of("/srv/jailer", vm)
    assert not caught.value.transient


def test_the_templates_are_no_machine() -> None:
    assert not paths.is_vm(paths.TEMPLATES)


def test_a_socket_path_over_107_bytes_is_refused_when_planning() -> None:
    base = "/" + "x" * (106 - paths.socket_length("/", 5))
    assert paths.socket_length(base, 5) == 107
    paths.of(base, "abcde")
    with pytest.raises(DriverError, match="108 bytes long, the kernel takes 107"):
        paths.of(base, "abcdef")


# metadata


def test_entries_that_do_not_fit_are_skipped_and_later_small_ones_still_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert metadata.environment([{"BIG": "x" * 40960, "SMALL": "fits"}]) == {"SMALL": "fits"}
    assert "BIG" in caplog.text
    assert "xxx" not in caplog.text


def test_a_name_that_cannot_be_exported_is_skipped() -> None:
    assert metadata.environment([{"BAD/KEY": "1", "0BAD": "2", "GOOD_KEY": "3"}]) == {"GOOD_KEY": "3"}


def test_the_budget_is_used_to_the_last_byte_and_no_further() -> None:
    exact = {"K": "v" * 32_765}
    assert metadata.environment([{**exact, "L": ""}]) == exact
    assert metadata.environment([{"K": "v" * 32_766}]) == {}
    assert metadata.environment([{"K": "é" * 16_382}]) == {"K": "é" * 16_382}
    assert metadata.environment([{"K": "é" * 16_383}]) == {}


def test_later_sources_win() -> None:
    assert metadata.environment([{"A": "forwarded", "B": "b"}, {"A": "label set"}]) == {
        "A": "label set",
        "B": "b",
    }


def test_the_document_has_what_an_agent_needs_and_omits_what_there_is_not() -> None:
    agent = {"FLEETLOG_AGENT_ID": "a-1", "FLEETLOG_AGENT_CREDENTIAL": "jwt"}
    assert metadata.document(agent, {}, (), "10.44.0.1") == {"latest": {"meta-data": agent}}
    full = metadata.document(agent, {"A": "b"}, ("m.lan:host-gateway", "n:fd00::1"), "10.44.0.1")
    assert full["latest"]["meta-data"] == {
        **agent, "FLEETLOG_EXTRA_HOSTS": "m.lan:10.44.0.1,n:fd00::1", "env": {"A": "b"}
    }  # fmt: skip


def test_a_document_that_grows_over_the_limit_as_json_is_refused_without_its_values() -> None:
    env = metadata.environment([{"A": "\x01" * 20_000}])
    with pytest.raises(DriverError, match="Firecracker takes 51200") as caught:
        metadata.document({}, env, (), "10.44.0.1")
    assert (caught.value.kind, caught.value.transient) == ("refused", False)
    assert "\\u0001" not in str(caught.value)


# machine


@pytest.mark.parametrize(
    ("cpus", "memory", "expected"),
    [
        (0.5, 1024**3, (1, 1024)),
        (1.5, 1536 * MIB, (2, 1536)),
        (2, 1_024_000, (2, 512)),
        (0, 0, (2, 512)),
        (0, MIB, (2, 1)),
    ],
)
def test_limits_become_whole_cpus_and_mebibytes(cpus: float, memory: int, expected: tuple[int, int]) -> None:
    assert machine.size(Resources(cpus=cpus, memory_bytes=memory), SET, CONFIG) == expected


def test_a_label_set_goes_before_its_scaler_and_limits_before_both() -> None:
    label_set = msgspec.structs.replace(SET, vcpus=4, mem_mib=100)
    assert machine.size(Resources(), label_set, CONFIG) == (4, 100)
    assert machine.size(Resources(cpus=1), label_set, CONFIG) == (1, 100)


def test_more_vcpus_than_firecracker_has_are_refused() -> None:
    with pytest.raises(DriverError, match="at most 32"):
        machine.size(Resources(cpus=32.5), SET, CONFIG)


def test_the_kernel_is_told_its_address_and_to_trust_the_cpus_randomness() -> None:
    line = machine.boot_args(LEASE, "quiet")
    assert line == (
        "console=ttyS0 reboot=k panic=1 random.trust_cpu=on init=/init "
        "ip=10.44.0.9::10.44.0.1:255.255.255.0::eth0:off quiet"
    )
    with pytest.raises(DriverError, match="at most 2047"):
        machine.boot_args(LEASE, "x" * 2000)


def test_the_configuration_sets_metadata_version_2_after_the_interface_it_is_on() -> None:
    made = machine.requests(Size(2, 512), "args", LEASE, {"latest": {}})
    by_path = {each.path: each.document for each in made}
    assert by_path["/mmds/config"] == {
        "version": "V2", "network_interfaces": ["eth0"], "ipv4_address": "169.254.169.254"
    }  # fmt: skip
    assert list(by_path).index("/network-interfaces/eth0") < list(by_path).index("/mmds/config")
    assert by_path["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 512, "smt": False}
    assert by_path["/boot-source"] == {"kernel_image_path": "/kernel", "boot_args": "args"}
    assert by_path["/drives/rootfs"] == {
        "drive_id": "rootfs", "path_on_host": "/rootfs.ext4", "is_root_device": True, "is_read_only": True
    }  # fmt: skip
    assert by_path["/drives/overlay"]["is_read_only"] is False
    assert by_path["/network-interfaces/eth0"] == {
        "iface_id": "eth0", "guest_mac": LEASE.mac, "host_dev_name": LEASE.tap
    }  # fmt: skip


def test_the_jailer_gets_identity_namespace_and_limits_and_no_file_of_ours(tmp_path: Path) -> None:
    binary = tmp_path / "firecracker"
    binary.touch()
    config = msgspec.structs.replace(CONFIG, firecracker_path=str(binary), netns="/run/netns/x")
    assert jailer.command(config, "a-1", ["--cgroup", "x=1"]) == [
        "/bin/jailer", "--id", "a-1", "--exec-file", str(binary), "--uid", "30000", "--gid", "30001",
        "--chroot-base-dir", "/srv/jailer", "--netns", "/run/netns/x", "--cgroup", "x=1",
        "--", "--api-sock", "/run/api.sock", "--log-path", "/vmm.log", "--level", "Warning",
    ]  # fmt: skip


# limits

FIRST = Cgroups(1, {"cpu": "/c/cpu", "memory": "/c/memory", "pids": "/c/pids"})
SECOND = Cgroups(2, {"cpu": "/c", "memory": "/c"})


def test_declared_limits_become_the_jailers_options_of_either_version() -> None:
    declared = Resources(cpus=1.5, memory_bytes=1024**3)
    most = 1024**3 + limits.OVERHEAD_BYTES
    assert limits.options(FIRST, "c-1", declared, Size(2, 1024)) == [
        "--cgroup-version", "1", "--parent-cgroup", "fleetlog-firecracker/c-1",
        "--cgroup", "cpu.cfs_period_us=100000", "--cgroup", "cpu.cfs_quota_us=150000",
        "--cgroup", f"memory.limit_in_bytes={most}", "--cgroup", "pids.max=66",
    ]  # fmt: skip
    assert limits.values(SECOND, declared, Size(2, 1024)) == ["cpu.max=150000 100000", f"memory.max={most}"]
    assert limits.values(SECOND, Resources(cpus=0.001), Size(1, 1)) == ["cpu.max=1000 100000"]


def test_without_limits_or_controllers_there_is_no_cgroup() -> None:
    assert limits.options(FIRST, "c-1", Resources(), Size(2, 512)) == []
    assert limits.options(Cgroups(0, {}), "c-1", Resources(cpus=1), Size(1, 512)) == []


def test_the_second_version_is_taken_where_it_has_the_controllers_else_the_first(tmp_path: Path) -> None:
    bare, full, cpu, memory = (tmp_path / name for name in ("bare", "full", "cpu", "memory"))
    for place, text in ((bare, "hugetlb\n"), (full, "cpu memory pids\n"), (cpu, ""), (memory, "")):
        place.mkdir()
        (place / "cgroup.controllers").write_text(text)

    def mount(place: Path, kind: str, *names: str) -> Mount:
        return Mount(point=place, root="/", kind=kind, controllers=frozenset(names))

    v1 = [mount(cpu, "cgroup", "cpu", "cpuacct"), mount(memory, "cgroup", "memory")]
    assert limits.detect([mount(full, "cgroup2")], v1).version == 2
    found = limits.detect([mount(bare, "cgroup2")], v1)
    assert (found.version, found.places) == (1, {"cpu": str(cpu), "memory": str(memory)})
    none = limits.detect([mount(bare, "cgroup2")], v1[:1])
    assert none.version == 0
    assert none.reason
    assert limits.directories(found, "c-1", "a-1") == [
        f"{cpu}/fleetlog-firecracker/c-1/a-1", f"{memory}/fleetlog-firecracker/c-1/a-1"
    ]  # fmt: skip


# images


def refusal(check: Callable[[], None]) -> DriverError:
    with pytest.raises(DriverError) as caught:
        check()
    assert not caught.value.transient
    return caught.value


def test_a_kernel_must_be_one_and_readable_for_the_jailed_user(tmp_path: Path) -> None:
    kernel = tmp_path / "vmlinux"
    missing = refusal(lambda: images.check_kernel(str(kernel), 30000, 30000))
    assert (missing.kind, "no such file" in str(missing)) == ("missing", True)
    kernel.write_bytes(b"MZ" + bytes(100))
    assert "is no ELF file" in str(refusal(lambda: images.check_kernel(str(kernel), 30000, 30000)))
    kernel.write_bytes(b"")
    assert "is no ELF file" in str(refusal(lambda: images.check_kernel(str(kernel), 30000, 30000)))
    kernel.write_bytes(b"\x7fELF" + bytes(100))
    kernel.chmod(0o600)
    assert "cannot be read by uid 30000" in str(
        refusal(lambda: images.check_kernel(str(kernel), 30000, 30000))
    )
    kernel.chmod(0o644)
    images.check_kernel(str(kernel), 30000, 30000)
    kernel.write_bytes(bytes(56) + b"ARM\x64" + bytes(100))
    images.check_kernel(str(kernel), 30000, 30000)
    assert "is not a file" in str(refusal(lambda: images.check_kernel(str(tmp_path), 30000, 30000)))


def ext4_head(blocks: int, shift: int = 2) -> bytes:
    block = bytearray(1024)
    struct.pack_into("<I", block, 0x04, blocks)
    struct.pack_into("<I", block, 0x18, shift)
    struct.pack_into("<H", block, 0x38, 0xEF53)
    return bytes(1024) + bytes(block)


def test_a_root_file_system_must_be_as_long_as_it_says(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs.ext4"
    rootfs.write_bytes(ext4_head(blocks=256))
    rootfs.chmod(0o644)
    assert "is truncated: 2048 bytes of 1048576" in str(
        refusal(lambda: images.check_rootfs(str(rootfs), 1, 1))
    )
    os.truncate(rootfs, MIB)
    images.check_rootfs(str(rootfs), 1, 1)
    os.truncate(rootfs, 0)
    assert "is truncated" in str(refusal(lambda: images.check_rootfs(str(rootfs), 1, 1)))
    rootfs.write_bytes(b"another file system" * 10)
    images.check_rootfs(str(rootfs), 1, 1)


def test_a_binary_that_is_not_executable_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "firecracker"
    assert refusal(lambda: images.check_program(str(binary), "firecracker_path")).kind == "missing"
    binary.touch(0o644)
    assert "chmod +x" in str(refusal(lambda: images.check_program(str(binary), "firecracker_path")))


# overlays


def template(path: Path, mib: int = 4) -> Path:
    with path.open("wb") as file:
        file.write(ext4_head(blocks=mib * 256))
        file.seek(MIB)
        file.write(b"data")
        file.truncate(mib * MIB)
    return path


def test_a_template_is_valid_with_its_exact_size_and_magic(tmp_path: Path) -> None:
    path = template(tmp_path / "t")
    assert overlay.valid(path, 4)
    assert not overlay.valid(path, 5)
    assert not overlay.valid(tmp_path / "missing", 4)
    with path.open("r+b") as file:
        file.seek(1080)
        file.write(b"\0\0")
    assert not overlay.valid(path, 4)


def test_a_copy_is_the_same_and_as_sparse(tmp_path: Path) -> None:
    source, target = template(tmp_path / "t", 64), tmp_path / "c"
    overlay.copy(source, target, NEVER)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < MIB


def test_a_full_disk_in_the_middle_of_a_copy_is_told_and_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[int] = []
    real = os.pwrite

    def full(descriptor: int, piece: bytes, at: int) -> int:
        if wrote:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote.append(at)
        return real(descriptor, piece, at)

    monkeypatch.setattr("infra.drivers.firecracker.overlay._cloned", lambda *_: False)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DriverError, match="No space left on device; free some room") as caught:
        overlay.copy(template(tmp_path / "t"), tmp_path / "c", NEVER)
    assert (caught.value.kind, caught.value.transient) == ("exhausted", True)


def test_a_copy_heeds_its_abort_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.drivers.firecracker.overlay._cloned", lambda *_: False)
    source, abort = template(tmp_path / "t"), threading.Event()
    abort.set()
    with pytest.raises(DriverError) as caught:
        overlay.copy(source, tmp_path / "c", abort)
    assert caught.value.kind == "aborted"
    with pytest.raises(DriverError) as caught:
        overlay.copy(source, tmp_path / "d", NEVER, timeout_s=-1)
    assert caught.value.kind == "timeout"


# consoles


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Kernel panic - not syncing: Fatal exception", "kernel-panic"),
        (
            "Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)",
            "rootfs-mount-failure",
        ),
        (
            "Failed to execute /init (error -2)\nKernel panic - not syncing: No working init found.",
            "init-failure",
        ),
        ("all is well", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_failed_boot_is_classified_by_its_console(text: str, found: str) -> None:
    assert boot_failure.classify(text) == found


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("systemd[1]: foo.service: Failed with result", "error"),
        ("Failed to start Network", "error"),
        ("Kernel panic - not syncing", "error"),
        ("hello", "debug"),
    ],
)
def test_console_lines_have_a_level_and_their_source(line: str, level: str) -> None:
    made = msgspec.json.decode(console.formed(line, "a-1", "firecracker-serial"))
    assert made == {
        "service": "fleetlog", "agent": "a-1", "source": "firecracker-serial", "level": level, "message": line
    }  # fmt: skip


def test_json_of_a_guest_passes_but_not_as_another() -> None:
    made = msgspec.json.decode(console.formed('{"level":"warn","agent":"x"}', "a-1", "firecracker-serial"))
    assert (made["level"], made["agent"], made["source"]) == ("warn", "a-1", "firecracker-serial")


def test_firecrackers_own_lines_are_told_apart() -> None:
    taken: list[tuple[str, str]] = []
    take = console.passing(lambda vm, line: taken.append((vm, line)))
    assert take is not None
    take(console.key("a-1", "firecracker-vmm"), "hello")
    assert taken[0][0] == "a-1"
    assert msgspec.json.decode(taken[0][1])["source"] == "firecracker-vmm"
    assert console.passing(None) is None


# disk guard


class Disk:
    """A disk with so much room, and so much after a reap."""

    def __init__(self, free: int, after: int) -> None:
        self.free, self.after, self.reaped, self.said = free, after, 0, ""

    def guard(self, base: str | None = "/srv/jailer") -> object:
        return msgspec.to_builtins(
            guard(
                base,
                self.reap,
                measure=lambda _: self.free,
                say=lambda text: setattr(self, "said", self.said + text),
            )
        )

    def reap(self) -> int:
        self.free, self.reaped = self.after, self.reaped + 3
        return 3


def test_with_room_nothing_is_reaped() -> None:
    disk = Disk(FREE_BYTES_LEAST, 0)
    assert disk.guard() == {"reaped": 0, "recovered": True, "free_bytes": FREE_BYTES_LEAST}
    assert (disk.reaped, disk.said) == (0, "")


def test_without_room_leftovers_are_reaped_and_it_is_measured_again() -> None:
    disk = Disk(FREE_BYTES_LEAST - 1, FREE_BYTES_LEAST)
    assert disk.guard() == {"reaped": 3, "recovered": True, "free_bytes": FREE_BYTES_LEAST}
    assert "removing leftovers" in disk.said
    still = Disk(5, 6)
    assert still.guard() == {"reaped": 3, "recovered": False, "free_bytes": 6}
    assert "fleetlog reap --offline" in still.said


def test_without_a_chroot_base_there_is_nothing_to_guard(tmp_path: Path) -> None:
    assert Disk(0, 0).guard(None) == {"reaped": 0, "recovered": True, "free_bytes": None}
    assert guard(str(tmp_path / "not" / "there"), lambda: 0, least_bytes=1).recovered

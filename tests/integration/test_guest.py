"""The test guest in a real Firecracker: a whole life over a real NATS, and each thing that tests can make it do."""

import itertools
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from actors.errors import LogUnavailable
from tests.guest.microvm import MicroVm
from tests.guest.rootfs import make_rootfs
from tests.guest.site import GuestSite, guest_site
from tests.integration.agent_site import BEAT_EVERY_S, eventually
from tests.needed import need_firecracker_host

VM = "vm-1"
_ETHERNET_BYTES = 14
_ALL_PROTOCOLS = 3


@pytest.fixture
def site(tmp_path: Path) -> Iterator[GuestSite]:
    need_firecracker_host()
    with guest_site(tmp_path) as made:
        yield made


def longest_gap_s(times_s: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


@pytest.mark.parametrize("jailed", [False, True], ids=["bare", "jailed"])
def test_a_guest_registers_acknowledges_beats_reports_and_powers_off(
    site: GuestSite, *, jailed: bool
) -> None:
    machine = site.boot(VM, "print at work; sleep 900; exit 7", jailed=jailed)
    assert machine.wait() == 0, "the guest reset the machine, which ends Firecracker well"
    (register,) = site.front.registers
    assert (register.vm, register.facts["ip"]) == (VM, str(machine.address))
    assert site.front.acked == [VM]
    (done,) = site.front.dones
    assert (done.vm, done.exit_code, done.session) == (VM, 7, register.session)
    assert site.lines_of(VM) == ["at work"]
    beats = site.agents.beats_of(VM)
    assert len(beats) >= 4
    assert statistics.median(b - a for a, b in itertools.pairwise(beats)) > 0.8 * BEAT_EVERY_S
    assert longest_gap_s(beats) < 2 * BEAT_EVERY_S
    said = machine.console.splitlines()
    steps = ["up,", "metadata,", "registered,", "configured,", "at work", "job is over, exit code 7", "off,"]
    assert [line.startswith(f"guest: {step}") for line, step in zip(said, steps, strict=True)] == [True] * 7


def test_sessions_of_two_guests_differ(site: GuestSite) -> None:
    machines = [site.boot("vm-1"), site.boot("vm-2")]
    assert [machine.wait() for machine in machines] == [0, 0]
    assert len({register.session for register in site.front.registers}) == 2


def test_without_a_word_from_the_test_the_job_ends_well_at_once(site: GuestSite) -> None:
    assert site.boot(VM).wait() == 0
    assert site.front.dones[0].exit_code == 0


def test_linux_form_of_the_address_and_a_root_drive_do_as_well(site: GuestSite) -> None:
    machine = site.machine(VM)
    address = f"ip={machine.address}::{site.segment.gateway}:255.255.0.0::eth0:off"
    rootfs = make_rootfs(machine.directory / "blank.ext4")
    machine.boot(site.metadata(VM), boot_args=f"console=ttyS0 reboot=k {address}", drives={"rootfs": rootfs})
    assert machine.wait() == 0
    assert site.front.dones[0].exit_code == 0


def test_metadata_may_come_after_the_start_and_the_test_key_in_the_env_map(site: GuestSite) -> None:
    machine = site.machine(VM)
    machine.boot(None)
    machine.wait_for("guest: up")
    machine.put_metadata({**site.metadata(VM), "env": {"FLEETLOG_GUEST_TEST": "exit 3"}})
    assert machine.wait() == 0
    assert site.front.dones[0].exit_code == 3


def test_a_guest_without_an_address_says_what_is_missing_and_leaves(site: GuestSite) -> None:
    machine = site.machine(VM)
    machine.boot(None, boot_args="console=ttyS0")
    assert machine.wait() == 0
    assert "must say fleetlog.ip=A.B.C.D/BITS" in machine.console


def test_a_guest_that_may_not_register_says_why_and_leaves(site: GuestSite) -> None:
    site.front.reaped.add(VM)
    machine = site.boot(VM, "wait")
    assert machine.wait() == 0
    assert "guest: declined (reaped): machine vm-1 is gone" in machine.console
    assert site.front.acked == []


def test_told_to_stop_a_guest_says_done_and_powers_off(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    site.agents.link.stop(VM, "nobody needs it", 5.0)
    assert machine.wait() == 0
    (done,) = site.front.dones
    assert (done.exit_code, done.detail) == (-15, "stopped: nobody needs it")


def test_a_guest_asks_again_until_its_end_is_noted(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    site.front.failures = [LogUnavailable("try later"), LogUnavailable("try later")]
    site.tell(VM, "exit 9")
    assert machine.wait() == 0
    assert [done.exit_code for done in site.front.dones] == [9]
    assert site.front.failures == []


def test_ctrl_alt_del_ends_a_guest_with_a_word(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    machine.press_ctrl_alt_del()
    assert machine.wait() == 0
    assert machine.console.endswith("guest: goodbye (Ctrl-Alt-Del)\n")
    assert site.front.dones == []


def test_a_guest_may_ignore_ctrl_alt_del_and_go_on(site: GuestSite) -> None:
    machine = site.boot(VM, "ignore-ctrl-alt-del; wait")
    eventually(lambda: site.front.acked, "the guest works")
    machine.press_ctrl_alt_del()
    machine.wait_for("Ctrl-Alt-Del ignored")
    beats = len(site.agents.beats_of(VM))
    eventually(lambda: len(site.agents.beats_of(VM)) > beats + 2, "it beats on")
    assert machine.running


def test_a_guest_may_leave_before_it_registers(site: GuestSite) -> None:
    machine = site.boot(VM, "exit-early")
    assert machine.wait() == 0
    assert "guest: exit before registering" in machine.console
    assert site.front.registers == []


def test_a_guest_may_never_register_and_still_obeys(site: GuestSite) -> None:
    machine = site.boot(VM, "never-register")
    machine.wait_for("guest: metadata")

    def heard() -> bool:
        site.tell(VM, "print here")  # again and again: nothing says when it has subscribed
        return "guest: here" in machine.console

    eventually(heard, "it hears us")
    assert site.front.registers == []
    machine.press_ctrl_alt_del()
    assert machine.wait() == 0


def test_a_guest_may_panic(site: GuestSite) -> None:
    machine = site.boot(VM, "panic")
    assert machine.wait() == 0
    assert machine.console.endswith("guest: panic: as told\n")
    assert site.front.acked == [VM]
    assert site.front.dones == []


def test_a_guest_may_hang_deaf_and_silent(site: GuestSite) -> None:
    machine = site.boot(VM, "sleep 500; hang")
    machine.wait_for("guest: hanging")
    heard_at_s = time.monotonic()
    machine.press_ctrl_alt_del()
    site.agents.link.stop(VM, "hello", 1.0)
    eventually(lambda: time.monotonic() > heard_at_s + 5 * BEAT_EVERY_S, "five beats' time")
    assert site.agents.beats_of(VM)[-1] < heard_at_s
    assert machine.running


@pytest.mark.parametrize(("words", "lines"), [("20000", 1), ("20000 lines", 20000 // 64 + 1)])
def test_a_guest_may_flood_its_console_and_beats_meanwhile(site: GuestSite, words: str, lines: int) -> None:
    machine = site.boot(VM, f"flood {words}; sleep {BEAT_EVERY_S * 2000:.0f}")
    assert machine.wait() == 0
    flood = [line for line in machine.console.splitlines() if line.startswith("x")]
    assert len(flood) == lines
    assert sum(line.count("x") for line in flood) >= 19_000
    assert longest_gap_s(site.agents.beats_of(VM)) < 3 * BEAT_EVERY_S


def test_a_busy_guest_burns_its_cpu_and_beats(site: GuestSite) -> None:
    machine = site.boot(VM, "busy 1000")
    eventually(lambda: site.front.acked, "the guest works")
    before_s = cpu_s(machine)
    machine.wait_for("job is over")
    assert cpu_s(machine) - before_s > 0.3
    assert len(site.agents.beats_of(VM)) >= 3


def test_an_idle_guest_takes_next_to_no_cpu(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: len(site.agents.beats_of(VM)) >= 2, "the guest works")
    before_s, beats = cpu_s(machine), len(site.agents.beats_of(VM))
    eventually(lambda: len(site.agents.beats_of(VM)) >= beats + 5, "a second passes")
    assert cpu_s(machine) - before_s < 0.2


def test_a_guest_is_understood_also_when_its_card_has_used_every_buffer_before(site: GuestSite) -> None:
    machine = site.boot(VM, "; ".join(f"print line {number}" for number in range(100)))
    assert machine.wait() == 0
    assert "line 99" in " ".join(site.lines_of(VM))
    names, values = (
        line.split()[1:]
        for line in site.segment.run("cat", "/proc/net/snmp").splitlines()
        if line[:3] == "Ip:"
    )
    assert dict(zip(names, values, strict=True))["InHdrErrors"] == "0", "every packet was whole"


def test_a_guest_comes_back_when_nats_does(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.agents.beats_of(VM), "the guest beats")
    site.server.kill()
    machine.wait_for("guest: NATS is gone")
    site.server.start()
    beats = len(site.agents.beats_of(VM))
    eventually(lambda: len(site.agents.beats_of(VM)) > beats + 2, "it beats again")
    site.tell(VM, "exit 4")
    assert machine.wait() == 0
    assert site.front.dones[0].exit_code == 4


def test_a_guest_finds_its_gateway_again_behind_a_new_mac_address(site: GuestSite) -> None:
    site.boot(VM, "wait")
    eventually(lambda: site.agents.beats_of(VM), "the guest beats")
    site.segment.ip_batch("link set br0 address 06:00:0a:2c:ff:ff")
    changed_at_s = time.monotonic()
    eventually(lambda: site.agents.beats_of(VM)[-1] > changed_at_s + 2, "it beats two seconds later")


def test_a_guest_gets_through_a_network_that_loses_every_fifth_packet(site: GuestSite) -> None:
    rule = "numgen random mod 5 == 0 drop"
    site.segment.run(
        "nft",
        f"table ip lossy {{ chain before {{ type filter hook input priority 0; iifname br0 {rule}; }}; "
        f"chain after {{ type filter hook output priority 0; oifname br0 {rule}; }}; }}",
    )
    machines = [site.boot(f"vm-{number}", "sleep 2000") for number in range(4)]
    assert [machine.wait(30) for machine in machines] == [0] * 4
    assert {done.vm for done in site.front.dones} == set(site.front.sessions) == {m.vm for m in machines}
    assert all(len(site.agents.beats_of(machine.vm)) >= 8 for machine in machines), (
        "no beat is lost, some are late"
    )


def test_a_renewed_credential_carries_a_guest_beyond_the_life_of_its_first(site: GuestSite) -> None:
    ttl_s = 3.0
    site.agents.reopen(ttl_s=ttl_s)
    machine = site.machine(VM)
    machine.boot(site.metadata(VM, "wait", ttl_s=ttl_s))
    eventually(lambda: site.agents.beats_of(VM), "the guest beats")
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() > began_s + 2 * ttl_s, "two lives", 10)
    assert "guest: credential renewed" in machine.console
    assert "expired" not in machine.console
    assert longest_gap_s(site.agents.beats_of(VM)) < 1.0


def test_a_guest_tells_what_came_of_a_connection_on_its_console_and_over_nats(site: GuestSite) -> None:
    site.segment.ip_batch("route add blackhole 10.97.0.0/16", "route add unreachable 10.98.0.0/16")
    with site.segment.entered():
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    gateway, port = site.segment.gateway, site.server.port
    site.tell(
        VM,
        f"connect {gateway} {port}; connect {gateway} 9; connect 10.44.99.99 22; connect 10.97.0.1 22; "
        "connect 10.98.0.1 22",
    )
    expected = [
        f"connect {gateway}:{port} open",
        f"connect {gateway}:9 refused",
        "connect 10.44.99.99:22 no-arp",
        "connect 10.97.0.1:22 timeout",
        "connect 10.98.0.1:22 unreachable",
    ]
    eventually(lambda: len(site.lines_of(VM)) == len(expected), "five reports")
    assert site.lines_of(VM) == expected
    assert all(f"guest: {line}\n" in machine.console for line in expected)


def test_a_guest_forges_frames_when_told(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap:
        tap.bind((machine.tap, 0))
        tap.settimeout(5)
        site.tell(VM, "forge-ip 10.44.7.7; forge-mac 02:00:00:00:00:07; forge-arp 10.44.8.8")
        eventually(lambda: len(site.lines_of(VM)) == 3, "three reports")
        frames = received(tap)
    assert [line.split()[-1] for line in site.lines_of(VM)] == ["sent"] * 3
    ours = bytes.fromhex(machine.mac.replace(":", ""))
    forged_ip = [frame for frame in frames if frame[26:30] == IPv4Address("10.44.7.7").packed]
    forged_mac = [frame for frame in frames if frame[6:12] == bytes.fromhex("020000000007")]
    claims = [
        frame for frame in frames if frame[12:14] == b"\x08\x06" and frame[28:32] == bytes([10, 44, 8, 8])
    ]
    assert {frame[6:12] for frame in forged_ip} == {ours} == {frame[22:28] for frame in claims}
    assert {frame[26:30] for frame in forged_mac} == {machine.address.packed}
    assert (len(forged_ip), len(forged_mac), len(claims)) == (3, 3, 3)


def test_a_guest_answers_pings(site: GuestSite) -> None:
    machine = site.boot(VM, "wait")
    eventually(lambda: site.front.acked, "the guest works")
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as icmp:
        icmp.settimeout(5)
        icmp.sendto(
            with_checksum(struct.pack("!BBHHH", 8, 0, 0, 7, 1) + b"are you there?"), (str(machine.address), 0)
        )
        packet = icmp.recv(1500)
    assert packet[20] == 0, "an echo reply"
    assert packet[28:] == b"are you there?"


def with_checksum(message: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total >> 16) + (total & 0xFFFF)
    return message[:2] + struct.pack("!H", ~total & 0xFFFF) + message[4:]


def received(tap: socket.socket) -> list[bytes]:
    frames = []
    tap.settimeout(0)
    try:
        while True:
            frames.append(tap.recv(2048))
    except BlockingIOError:
        return frames


def cpu_s(machine: MicroVm) -> float:
    fields = Path(f"/proc/{machine.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100

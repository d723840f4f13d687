"""The reference agent against a real NATS: a whole life, and every way in which one is not let in."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.errors import LogUnavailable
from events import subjects
from infra.agent.protocol import Register, Stop, encode
from infra.credentials import parse_creds
from tests.conftest import NatsServer
from tests.integration.agent_site import AGENT, Site, eventually
from tests.raw_nats import NatsConnection as RawConnection

SESSION = "ab" * 16


@pytest.fixture
def site(nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    name = request.node.name.split("[")[0].replace("_", "-").removeprefix("test-")[:50].strip("-")
    opened = Site(nats_server, name, tmp_path)
    yield opened
    opened.close()


def raw(site: Site, vm: str) -> RawConnection:
    """Connect as the agent of `vm`, below any client's manners."""
    credential = parse_creds(site.environment(vm)["FLEETLOG_AGENT_CREDENTIAL"])
    return RawConnection("127.0.0.1", site.server.port, credential)


def shell(script: str) -> tuple[str, str, str]:
    return ("sh", "-c", script)


def test_an_agent_registers_is_configured_runs_its_command_and_reports(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start(
        "vm-1",
        *shell('echo "$FLEETLOG_JOB $FLEETLOG_RUN $FLEETLOG_LABELS $FLEETLOG_GATE"; echo bad >&2; exit 7'),
    )
    assert agent.wait(30) == 7
    assert site.printed("vm-1") == "job-7 run-9 linux,kvm kvm\n"
    assert "bad" in site.said("vm-1")
    (register,) = site.front.registers
    assert register.facts["os"] == "Linux"
    assert site.front.acked == ["vm-1"]
    (done,) = site.front.dones
    assert (done.vm, done.exit_code, done.session) == ("vm-1", 7, register.session)
    eventually(
        lambda: {("vm-1", "job-7 run-9 linux,kvm kvm"), ("vm-1", "bad")} <= set(site.lines), "both lines came"
    )
    assert site.beats_of("vm-1")


def test_beats_come_in_the_rhythm_the_coordinator_asked_for(site: Site) -> None:
    site.front.known.add("vm-1")
    site.start("vm-1", "sleep", "60")
    eventually(lambda: len(site.beats_of("vm-1")) >= 11, "eleven beats")
    beats = site.beats_of("vm-1")[:11]
    assert 0.19 <= (beats[-1] - beats[0]) / 10 <= 0.3


def test_a_bearer_token_is_enough_for_a_guest_that_cannot_sign(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start("vm-1", "true", environment=site.environment("vm-1", bearer=True))
    assert agent.wait(30) == 0
    assert len(site.front.dones) == 1


def test_the_job_finds_the_credential_neither_in_its_environment_nor_in_what_proc_shows(site: Site) -> None:
    site.front.known.add("vm-1")
    environment = site.environment("vm-1")
    secret = parse_creds(environment["FLEETLOG_AGENT_CREDENTIAL"])
    assert secret.seed is not None
    agent = site.start(
        "vm-1", *shell("env; tr '\\0' '\\n' <\"/proc/$PPID/environ\"; cat /proc/$PPID/cmdline")
    )
    assert agent.wait(30) == 0
    seen = site.printed("vm-1")
    assert "FLEETLOG_AGENT_ID=vm-1" in seen
    assert secret.seed not in seen
    assert secret.jwt not in seen
    assert "BEGIN" not in seen


@pytest.mark.parametrize(
    ("state", "code"), [("unknown", "unknown-agent"), ("reaped", "reaped"), ("used", "already-registered")]
)
def test_an_agent_that_may_not_register_leaves_with_the_reason_and_runs_nothing(
    site: Site, state: str, code: str
) -> None:
    if state == "reaped":
        site.front.reaped.add("vm-1")
    elif state == "used":
        site.front.known.add("vm-1")
        site.front.sessions["vm-1"] = SESSION
    ran = site.directory / "ran"
    agent = site.start("vm-1", "touch", str(ran))
    assert agent.wait(30) == 3
    assert f"registration refused ({code})" in site.said("vm-1")
    assert not ran.exists()
    assert site.front.dones == []
    assert site.front.beats == []


def test_an_expired_credential_does_not_even_reach_the_coordinator(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start("vm-1", "true", environment=site.environment("vm-1", ttl_s=-1))
    assert agent.wait(30) == 3
    assert "NATS refuses the credential" in site.said("vm-1")
    assert site.front.registers == []


def test_the_credential_of_one_agent_does_not_let_it_in_as_another(site: Site) -> None:
    site.front.known.update(("vm-a", "vm-b"))
    foreign = site.environment("vm-a") | {"FLEETLOG_AGENT_ID": "vm-b"}
    agent = site.start("vm-b", "true", environment=foreign)
    assert agent.wait(30) == 3
    assert "does not let this credential speak as agent vm-b" in site.said("vm-b")
    assert site.front.registers == []


def test_nats_itself_refuses_whatever_an_agent_says_or_hears_beyond_its_own_subjects(site: Site) -> None:
    stream = subjects.log(site.cluster, "vm.vm-b")
    with raw(site, "vm-a") as agent:
        for subject in (
            subjects.agent(site.cluster, "vm-b", "register"),
            subjects.agent_command(site.cluster, "vm-a"),
            subjects.api(site.cluster, "demand"),
            subjects.presence(site.cluster, "c1"),
            stream,
            "$JS.API.STREAM.LIST",
            subjects.agent("other-cluster", "vm-a", "register"),
        ):
            agent.publish(subject, b"{}")
            assert agent.settle(), f"publishing on {subject} was allowed"
        for subject in (
            subjects.agent_command(site.cluster, "vm-b"),
            f"{subjects.agent_inbox('vm-b')}.x",
            "_INBOX.>",
            ">",
            stream,
        ):
            agent.subscribe(subject)
            assert agent.settle(), f"listening to {subject} was allowed"
        agent.publish(subjects.agent(site.cluster, "vm-a", "beat"), b"{}")
        assert agent.settle() == []


def test_an_agent_cannot_make_the_coordinator_speak_where_it_may_not(site: Site) -> None:
    site.front.known.add("vm-a")
    heard: list[bytes] = []
    target = subjects.log(site.cluster, "vm.vm-a")
    listening = site.connection.subscribe(target, lambda message: heard.append(message.payload))
    with raw(site, "vm-a") as agent:
        payload = encode(Register(session=SESSION))
        agent.publish(subjects.agent(site.cluster, "vm-a", "register"), payload, reply_to=target)
        agent.publish(subjects.agent(site.cluster, "vm-a", "register"), b"junk", reply_to=target)
        agent.publish(
            subjects.agent(site.cluster, "vm-a", "done"),
            payload,
            reply_to=f"{subjects.agent_inbox('vm-b')}.x",
        )
        assert agent.settle() == []
    eventually(
        lambda: site.door.counts().get(("reply", "foreign-inbox")) == 3, "three answers were kept back"
    )
    site.connection.publish(target, b"marker")
    eventually(lambda: heard, "the marker came")
    assert heard == [b"marker"]
    listening.stop()


def test_a_malformed_message_is_answered_with_the_reason_and_counted(site: Site) -> None:
    inbox = f"{subjects.agent_inbox('vm-a')}.1"
    with raw(site, "vm-a") as agent:
        answer = json.loads(
            agent.request(subjects.agent(site.cluster, "vm-a", "register"), b"{}", inbox=inbox)
        )
        assert (answer["answer"], answer["code"]) == ("declined", "malformed")
        assert answer["retry_after_s"] is None
        agent.publish(subjects.agent(site.cluster, "vm-a", "beat"), b"\xff" * 100_000)
        assert agent.settle() == []
    eventually(lambda: site.door.counts().get(("beat", "malformed")) == 1, "the beat was counted")
    assert site.front.registers == []
    assert site.front.beats == []


def test_an_address_that_promises_tls_is_not_spoken_to_in_plain_text(site: Site) -> None:
    site.front.known.add("vm-1")
    environment = site.environment("vm-1") | {"FLEETLOG_NATS_URL": f"tls://127.0.0.1:{site.server.port}"}
    agent = site.start("vm-1", "true", options=("--register-timeout", "1"), environment=environment)
    assert agent.wait(30) == 4
    assert "the server speaks no TLS" in site.said("vm-1")
    assert site.front.registers == []


def test_a_coordinator_without_the_duty_stays_silent(site: Site) -> None:
    site.front.elsewhere.add("vm-1")
    agent = site.start("vm-1", "true", options=("--register-timeout", "1"))
    assert agent.wait(30) == 4
    assert site.front.registers
    assert "is a coordinator of cluster" in site.said("vm-1")


def test_a_log_that_does_not_answer_is_no_refusal_and_the_agent_asks_again(site: Site) -> None:
    site.front.known.add("vm-1")
    site.front.failures.append(LogUnavailable("the log does not answer"))
    agent = site.start("vm-1", "true")
    assert agent.wait(30) == 0
    sessions = {register.session for register in site.front.registers}
    assert len(site.front.registers) == 2
    assert len(sessions) == 1


def test_slow_registrations_do_not_hold_up_the_beats_of_others(site: Site) -> None:
    site.front.known.update({"vm-1", *(f"vm-slow-{n}" for n in range(6))})
    site.start("vm-1", "sleep", "60")
    eventually(lambda: site.front.acked, "the agent is in")
    site.front.hold = threading.Event()
    for n in range(6):  # more than the door has threads
        with raw(site, f"vm-slow-{n}") as slow:
            slow.publish(
                subjects.agent(site.cluster, f"vm-slow-{n}", "register"), encode(Register(session=SESSION))
            )
            slow.settle()
    eventually(lambda: len(site.front.registers) >= 5, "all threads are held up")
    before = len(site.beats_of("vm-1"))
    eventually(lambda: len(site.beats_of("vm-1")) >= before + 10, "ten more beats", 4)
    site.front.hold.set()


def test_a_stop_ends_the_job_politely_and_its_end_is_reported(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start(
        "vm-1", *shell("trap 'echo stopping; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    )
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    site.link.stop("vm-1", "drain", 20)
    assert agent.wait(15) == 5
    assert site.front.dones[0].exit_code == 5
    assert site.front.dones[0].detail == "stopped: drain"
    assert ("vm-1", "stopping") in site.lines


def test_a_job_that_does_not_stop_is_killed_after_the_grace_with_all_its_children(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start(
        "vm-1", *shell("trap '' TERM; sleep 300 & echo child $!; while :; do sleep 0.05; done")
    )
    eventually(lambda: any(line.startswith("child") for _, line in site.lines), "the job runs")
    child = int(next(line for _, line in site.lines if line.startswith("child")).split()[1])
    began = time.monotonic()
    site.link.stop("vm-1", "drain", 0.5)
    assert agent.wait(15) == 128 + signal.SIGKILL
    assert time.monotonic() - began >= 0.5
    assert site.front.dones[0].exit_code == -signal.SIGKILL
    eventually(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), "the child is gone")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent_reaches_the_job_and_the_end_is_reported(
    site: Site, number: signal.Signals
) -> None:
    site.front.known.add("vm-1")
    script = f"trap 'exit 9' {number.name.removeprefix('SIG')}; echo ready; while :; do sleep 0.05; done"
    agent = site.start("vm-1", *shell(script))
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    agent.send_signal(number)
    assert agent.wait(15) == 9
    assert site.front.dones[0].exit_code == 9
    assert number.name in site.front.dones[0].detail


def test_a_command_that_is_not_there_is_found_out_before_anybody_counts_on_the_agent(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start("vm-1", "no-such-command")
    assert agent.wait(30) == 127
    assert "'no-such-command' was not found" in site.said("vm-1")
    assert site.front.registers == []


def test_a_command_that_turns_out_not_to_run_is_reported(site: Site) -> None:
    site.front.known.add("vm-1")
    broken = site.directory / "broken"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    agent = site.start("vm-1", str(broken))
    assert agent.wait(30) == 126
    assert site.front.dones[0].exit_code == 126
    assert "cannot be run" in site.front.dones[0].detail


def test_a_dry_run_tells_everything_but_the_secret_and_sends_nothing(site: Site) -> None:
    environment = site.environment("vm-1")
    agent = site.start("vm-1", "true", options=("--dry-run",), environment=environment)
    assert agent.wait(30) == 0
    told = site.printed("vm-1")
    assert "vm-1" in told
    assert site.server.url in told
    secret = parse_creds(environment["FLEETLOG_AGENT_CREDENTIAL"])
    assert secret.seed is not None
    assert secret.seed not in told
    assert secret.jwt not in told
    assert site.front.registers == []


def test_the_help_names_what_a_newcomer_needs() -> None:
    told = subprocess.run(
        [AGENT, "--help"], check=True, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    ).stdout
    for needed in ("FLEETLOG_AGENT_CREDENTIAL", "Exit codes", "--dry-run", "fleetlog-agent -- ./run.sh"):
        assert needed in told


def test_a_repeated_configuration_is_acknowledged_and_a_strange_command_is_left_out(site: Site) -> None:
    site.front.known.add("vm-1")
    agent = site.start("vm-1", *shell("echo ready; sleep 60"))
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    command = subjects.agent_command(site.cluster, "vm-1")
    site.connection.publish(command, b"junk")
    site.connection.publish(command, b'{"command":"config","protocol":1,"beat_every_s":0.1}')
    eventually(lambda: len(site.front.acked) == 2, "acknowledged again")
    site.connection.publish(command, b'{"command":"renew","jwt":"a.b.c"}')
    site.connection.publish(command, encode(Stop(reason="enough", grace_s=5)))
    assert agent.wait(15) == 128 + signal.SIGTERM
    assert site.front.dones[0].exit_code == -signal.SIGTERM


def test_the_tests_run_the_agent_of_this_tree() -> None:
    assert AGENT.exists(), f"{AGENT} is made by `make setup`; {sys.executable} has none beside it"

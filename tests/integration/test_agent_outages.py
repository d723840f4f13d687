"""The reference agent when things fail: servers die, credentials end, jobs flood. A running job notices none of it."""

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors.errors import LogUnavailable
from infra.agent.allowance import Rate
from tests.conftest import NatsServer
from tests.integration.agent_site import BEAT_EVERY_S, Site, eventually

TTL_S = 4.0


@pytest.fixture
def site(own_nats_server: NatsServer, tmp_path: Path) -> Iterator[Site]:
    opened = Site(own_nats_server, "main", tmp_path)
    opened.front.known.add("vm-1")
    yield opened
    opened.close()


def job_that_waits(site: Site) -> tuple[tuple[str, ...], Path, Path]:
    """Return a command that ends with code 6 once a file is there, and says so by another."""
    go, over = site.directory / "go", site.directory / "over"
    return ("sh", "-c", f"echo ready; until [ -e {go} ]; do sleep 0.05; done; touch {over}; exit 6"), go, over


def longest_gap_s(times: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_server_that_dies_in_the_middle_of_a_job_changes_nothing_for_the_job(site: Site, how: str) -> None:
    command, go, _ = job_that_waits(site)
    agent = site.start("vm-1", *command)
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    job = psutil.Process(agent.pid).children()[0]
    for _ in range(2):
        getattr(site.server, how)()
        site.server.start()
        before = len(site.beats_of("vm-1"))
        eventually(lambda: len(site.beats_of("vm-1")) > before + 3, "beats come again")  # noqa: B023
    assert job.is_running()
    go.touch()
    assert agent.wait(20) == 6
    assert [done.exit_code for done in site.front.dones] == [6]
    assert len(site.front.registers) == 1


def test_the_end_of_a_job_is_reported_when_the_server_is_back(site: Site) -> None:
    command, go, over = job_that_waits(site)
    agent = site.start("vm-1", *command)
    eventually(lambda: site.front.acked and ("vm-1", "ready") in site.lines, "the job runs")
    site.server.kill()
    go.touch()
    eventually(over.exists, "the job ended while there was no server")
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(1.5)
    assert site.front.dones == []
    site.server.start()
    assert agent.wait(20) == 6
    assert [done.exit_code for done in site.front.dones] == [6]


def test_the_end_is_reported_until_the_log_has_it(site: Site) -> None:
    agent = site.start("vm-1", "sh", "-c", "echo ready; sleep 0.3")
    eventually(lambda: site.front.acked, "the agent is in")
    site.front.failures.extend([LogUnavailable("no answer"), TimeoutError("too slow")])
    assert agent.wait(20) == 0
    assert len(site.front.dones) == 1
    assert site.front.failures == []


def test_an_end_nobody_notes_is_given_up_after_a_bound_and_the_exit_code_is_still_the_commands(
    site: Site,
) -> None:
    command, go, _ = job_that_waits(site)
    agent = site.start("vm-1", *command, options=("--done-timeout", "1"))
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    site.server.kill()
    go.touch()
    assert agent.wait(20) == 6
    assert "could not be reported" in site.said("vm-1")
    site.server.start()


def test_an_agent_that_reaches_nobody_gives_up_after_a_bound(site: Site) -> None:
    environment = site.environment("vm-1")
    site.server.kill()
    agent = site.start("vm-1", "true", options=("--register-timeout", "1"), environment=environment)
    assert agent.wait(20) == 4
    assert "cannot be reached" in site.said("vm-1")
    site.server.start()


def test_renewals_keep_an_agent_connected_for_longer_than_its_first_credential_lives(site: Site) -> None:
    site.reopen(ttl_s=TTL_S)
    agent = site.start(
        "vm-1", "sh", "-c", "echo ready; sleep 300", environment=site.environment("vm-1", ttl_s=TTL_S)
    )
    eventually(lambda: ("vm-1", "ready") in site.lines, "the job runs")
    began_s = site.clock.monotonic_s()
    # In the middle the door forgets everything, as in a restart: renewal must not depend on what it kept.
    eventually(lambda: site.clock.monotonic_s() > began_s + 1.5 * TTL_S, "one and a half lives", 10)
    site.reopen(ttl_s=TTL_S)
    eventually(lambda: site.clock.monotonic_s() > began_s + 3 * TTL_S, "three lives", 15)
    assert longest_gap_s(site.beats_of("vm-1")) < 1.0, "no beat was lost over three lives of a credential"
    assert site.door.counts()["renew", "sent"] >= 2
    assert "authentication expired" not in site.said("vm-1"), "renewed in time, not after the server hung up"
    agent.terminate()
    assert agent.wait(20) == 128 + signal.SIGTERM
    assert site.front.dones[0].exit_code == -signal.SIGTERM


def test_the_credential_of_an_agent_that_is_not_live_any_more_ends_and_is_not_renewed(site: Site) -> None:
    site.reopen(ttl_s=TTL_S)
    agent = site.start(
        "vm-1",
        "sleep",
        "300",
        options=("--done-timeout", "0.5"),
        environment=site.environment("vm-1", ttl_s=TTL_S),
    )
    eventually(lambda: site.front.acked, "the agent is in")
    site.front.reaped.add("vm-1")
    began_s = site.clock.monotonic_s()

    def silent() -> bool:
        return site.clock.monotonic_s() - site.beats_of("vm-1")[-1] > 5 * BEAT_EVERY_S

    eventually(silent, "NATS hung up", 15)
    assert site.clock.monotonic_s() - began_s < 2 * TTL_S + 1
    eventually(lambda: "authentication expired" in site.said("vm-1"), "the agent says why")
    assert ("renew", "sent") not in site.door.counts()
    assert psutil.Process(agent.pid).children(), "but the job is not the agent's to end"


def test_a_job_that_floods_its_output_delays_no_beat_and_fills_no_memory(site: Site) -> None:
    site.reopen(rate=Rate(lines_per_s=100, lines_at_once=200))
    sink = os.open(os.devnull, os.O_WRONLY)
    agent = site.start("vm-1", "yes", stdout=sink)
    os.close(sink)
    process = psutil.Process(agent.pid)
    eventually(lambda: len(site.beats_of("vm-1")) > 5, "the agent is in")
    rss_bytes = process.memory_info().rss
    eventually(lambda: len(site.beats_of("vm-1")) > 5 / BEAT_EVERY_S, "five seconds of beats")
    beats = site.beats_of("vm-1")
    assert longest_gap_s(beats) < 3 * BEAT_EVERY_S
    assert process.memory_info().rss - rss_bytes < 16 * 1024 * 1024
    texts = [text for _, text in site.lines]
    assert any("lines are missing here" in text for text in texts)
    seconds = beats[-1] - beats[0]
    assert len(texts) < 200 + 100 * (seconds + 2) + 100, "the door holds the rate"


def test_a_terminal_that_takes_no_more_slows_the_job_but_not_the_beats(site: Site) -> None:
    reading, writing = os.pipe()
    try:
        site.start("vm-1", "yes", stdout=writing)
        eventually(lambda: len(site.beats_of("vm-1")) > 3 / BEAT_EVERY_S, "three seconds of beats")
        assert longest_gap_s(site.beats_of("vm-1")) < 3 * BEAT_EVERY_S
    finally:
        os.close(writing)
        os.close(reading)


def test_a_child_that_keeps_the_output_open_does_not_keep_the_agent(site: Site) -> None:
    # It left the process group, so it is not the agent's to end; here it ends by itself soon after.
    agent = site.start("vm-1", "sh", "-c", "setsid sleep 20 & sleep 0.5; exit 4")
    assert agent.wait(12) == 4
    assert site.front.dones[0].exit_code == 4

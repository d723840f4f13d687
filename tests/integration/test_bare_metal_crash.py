"""The coordinator is killed at every step of a life; the next one knows what there is, and can end or go on with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from events.vm import Handle
from tests.contract.driver_rigs import Ends, wait_until
from tests.integration.bare_metal_site import VM, Site, alive

NEVER = threading.Event()


@pytest.fixture(params=["auto", "none"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    cgroup: Literal["auto", "none"] = request.param
    made = Site(tmp_path)
    made.configure(cgroup=cgroup)
    made.script("n=0; while :; do n=$((n+1)); echo $n; echo $n > count; sleep 0.05; done")
    yield made
    made.clean()
    made.assert_nothing_is_left()


def crash_at(site: Site, point: str) -> tuple[dict[str, Any], Handle | None]:
    """Run a coordinator's driver until it dies at `point`; return the placement and the handle it got to tell."""
    config = msgspec.json.encode(site.config).decode()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.bare_metal_victim", config, VM, point],
        stdout=subprocess.PIPE,
        check=False,
        timeout=30,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL
    placement, *handle = done.stdout.splitlines()
    return (
        msgspec.json.decode(placement, type=dict[str, Any]),
        msgspec.json.decode(handle[0], type=Handle) if handle else None,
    )


@pytest.mark.parametrize("point", ["bare-metal.spawn.directory", "bare-metal.spawn.cgroup"])
def test_killed_before_the_process_it_is_half_made_and_taken_away(site: Site, point: str) -> None:
    placement, _ = crash_at(site, point)
    driver = site.driver()
    assert driver.inspect(VM, placement, None).presence == "half-made"
    assert {(r.vm, r.owner) for r in site.survey(driver)} == {(VM, site.config.owner)}
    driver.destroy(VM, placement, None, NEVER)
    assert driver.inspect(VM, placement, None).presence == "absent"
    assert site.survey(driver) == []


@pytest.mark.parametrize("point", ["bare-metal.spawn.started", "bare-metal.spawn.recorded", "spawned"])
def test_killed_after_the_process_began_it_is_taken_up_without_a_record_in_the_log(
    site: Site, point: str
) -> None:
    placement, told = crash_at(site, point)
    lines: list[str] = []
    driver = site.driver(sink=lambda _, line: lines.append(line))
    wait_until(
        lambda: driver.inspect(VM, placement, None).presence == "running", "the process became the agent"
    )
    handle = driver.inspect(VM, placement, None).handle
    assert handle is not None
    assert told in (None, handle)
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    wait_until(lambda: len(lines) > 5, "its output is passed on")
    assert lines[0] == "1", "from its first line, as the first coordinator never came to pass one on"
    os.kill(handle.data["pid"], signal.SIGKILL)
    how = ends.wait()
    assert how.exit_code is None, "it was not our child, so the code is unknown and not guessed"
    driver.destroy(VM, placement, handle, NEVER)
    assert site.survey(driver) == []


def test_killed_at_once_after_the_start_it_can_be_taken_down_at_once(site: Site) -> None:
    placement, _ = crash_at(site, "bare-metal.spawn.started")
    driver = site.driver()
    driver.destroy(VM, placement, None, NEVER)
    assert driver.inspect(VM, placement, None).presence == "absent"
    site.assert_no_process_is_left()


@pytest.mark.parametrize("point", ["bare-metal.destroy.ended", "destroyed"])
def test_killed_within_a_teardown_the_next_one_finishes_it(site: Site, point: str) -> None:
    placement, handle = crash_at(site, point)
    driver = site.driver()
    assert handle is not None
    assert not alive(handle.data["pid"])
    assert driver.inspect(VM, placement, handle).presence in ("half-made", "absent")
    driver.destroy(VM, placement, handle, NEVER)
    assert driver.inspect(VM, placement, handle).presence == "absent"
    assert site.survey(driver) == []


def test_an_agent_works_on_while_no_coordinator_lives(site: Site) -> None:
    crash_at(site, "spawned")
    before = int(site.wait_for("count"))
    wait_until(lambda: int((site.work() / "count").read_text() or 0) > before + 3, "it counts on")

"""Processes that nothing tracks: what a sweep takes and spares, and what an operator may end. Real ones, no log."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.decisions.reclaim import Standing
from actors.sweep import Sweeper
from infra.drivers.bare_metal import hierarchy
from infra.drivers.bare_metal.leftovers import ProcessLeftovers
from infra.reclaiming import NoLog
from tests.contract.driver_rigs import wait_until
from tests.integration.bare_metal_site import OWNER, VM, Site

FOREVER = 'echo up > up; trap "" TERM; while :; do sleep 0.1; done'


@pytest.fixture(params=["auto", "none"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A place with agents in cgroups, and one without."""
    made = Site(tmp_path)
    made.configure(cgroup=request.param)
    yield made
    made.clean()


def sweeper(site: Site, owner: str = OWNER) -> Sweeper:
    config = msgspec.structs.replace(site.config, owner=owner)
    return Sweeper(owner, [ProcessLeftovers(config, hierarchy.find)])


def orphan(site: Site, vm: str = VM, script: str = FOREVER) -> psutil.Process:
    """Have an agent that no driver watches any more."""
    site.script(script)
    driver = site.driver()
    _, handle = site.spawn(driver, vm)
    site.wait_for("up", vm)
    driver.close()
    return psutil.Process(handle.data["pid"])


def end(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it is dead")


def outcomes(site: Site, found: Sweeper) -> dict[str, str]:
    """Return what became of the directories here and of our own cgroups."""
    report = found.sweep(NoLog())
    mine = [each for each in report.findings if each.leftover.owner in (OWNER, None)]
    return {f"{each.leftover.kind} {each.leftover.vm}": each.outcome for each in mine}


def test_what_is_dead_goes_and_what_lives_stays_without_any_log(site: Site) -> None:
    living, dead = orphan(site, "living"), orphan(site, "dead")
    end(dead)
    found: dict[str, str] = {}

    def reaped() -> bool:
        found.update(outcomes(site, sweeper(site)))
        return found["directory dead"] == "reaped"

    wait_until(reaped, "it is reaped as soon as the last child of its shell has ended, too")
    assert found["directory living"] == "spared"
    assert living.is_running()
    runs = site.root / "state" / "runs"
    assert [path.name for path in runs.iterdir()] == ["living"]
    assert set(outcomes(site, sweeper(site)).values()) == {"spared"}


def test_a_process_that_outlives_its_first_one_keeps_its_directory(site: Site) -> None:
    first = orphan(site, script=f"setsid sh -c 'echo $$ > child; {FOREVER}' & wait")
    child = psutil.Process(int(site.wait_for("child")))
    end(first)
    assert outcomes(site, sweeper(site))[f"directory {VM}"] == "spared"
    assert child.is_running()
    stopped = sweeper(site).stop(VM, NoLog())
    assert stopped.outcome == "stopped", stopped
    wait_until(lambda: not child.is_running(), "all of it is ended")
    assert not (site.root / "state" / "runs" / VM).exists()


def test_what_bears_another_name_or_none_stays(site: Site) -> None:
    end(orphan(site, "theirs"))
    (site.root / "state" / "runs" / "unmarked").mkdir()
    assert sweeper(site, "somebody-else").sweep(NoLog()).counts("reaped") == {}
    assert (site.root / "state" / "runs" / "theirs").exists()
    assert outcomes(site, sweeper(site))["directory unmarked"] == "spared"
    (site.root / "state" / "runs" / "unmarked").rmdir()


def test_an_operator_ends_what_nobody_accounts_for_and_nothing_else(site: Site) -> None:
    process = orphan(site)
    (machine,) = (each for each in sweeper(site).live(NoLog()) if each.vm == VM)
    assert (machine.status, machine.pid) == ("orphaned", process.pid)
    assert machine.age_s is not None
    assert 0 <= machine.age_s < 60
    assert sweeper(site, "somebody-else").stop(VM, NoLog()).outcome == "tracked"
    assert sweeper(site).stop(f"x/../{VM}", NoLog()).outcome == "not-found"
    assert process.is_running()
    assert sweeper(site).stop(VM, NoLog()).outcome == "stopped"
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not any((site.root / "state" / "runs").iterdir())
    assert not [each for each in site.survey(site.driver()) if each.vm == VM]


def test_an_agent_let_in_while_it_is_proven_is_not_ended(site: Site) -> None:
    process = orphan(site)

    class Late(NoLog):
        answers: list[Standing] = ["absent", "live"]

        def standing(self, vm: str) -> Standing:
            return self.answers.pop(0) if vm == VM else "absent"

    ledger = Late()
    stopped = sweeper(site).stop(VM, ledger)
    assert (stopped.outcome, ledger.answers) == ("tracked", [])
    assert process.is_running()
    assert sweeper(site).reap_unowned(VM, NoLog())


def test_an_empty_cgroup_goes_and_one_with_a_process_stays(tmp_path: Path) -> None:
    site = Site(tmp_path)
    found, why = hierarchy.find(OWNER, Path(site.config.state_dir), site.config.shell)
    if found is None:
        pytest.skip(f"no cgroup can be made here: {why}")
    empty, full = (found.cgroup(found.path_of(vm)) for vm in ("empty", "full"))
    sleeper = psutil.Popen(["sleep", "60"])
    try:
        for each in (empty, full):
            each.path.mkdir(parents=True)
        full.procs.write_text(str(sleeper.pid))
        assert outcomes(site, sweeper(site)) == {"cgroup empty": "reaped", "cgroup full": "spared"}
        assert (empty.exists(), full.exists()) == (False, True)
        (machine,) = (each for each in sweeper(site).live(NoLog()) if each.vm == "full")
        assert machine.status == "unverified", "a cgroup's name alone is no proof of what runs in it"
    finally:
        sleeper.kill()
        sleeper.wait()
        full.remove(2)
        site.clean()

"""Host processes that a lost log left: the dead go at the start, the living by name, through a kill at each step."""

from __future__ import annotations

import os
import shutil
import signal

import psutil

from tests.acceptance.host import wait_until
from tests.acceptance.place import Place


def lose_the_log(place: Place) -> None:
    """Take away all that the coordinator kept, but for its machines."""
    for path in place.data.iterdir():
        if path.name == "machines":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def left(place: Place) -> list[str]:
    return sorted(path.name for path in (place.data / "machines" / "runs").iterdir())


def lives(pid: int) -> bool:
    """Tell whether the process runs; one that nobody collects does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_after_a_lost_log_what_is_dead_goes_and_what_lives_is_ended_by_name(place: Place) -> None:
    first = place.start()
    living, dead = place.demand("held"), place.demand("held")
    pids = {}
    for vm in (living, dead):
        place.wait_phase(vm, "registered")
        handle = place.lives()[vm].handle
        assert handle is not None
        pids[vm] = int(handle.data["pid"])
    first.kill()
    tree = [psutil.Process(pids[dead]), *psutil.Process(pids[dead]).children(recursive=True)]
    for process in tree:
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(lives(each.pid) for each in tree), "all of it is dead")
    lose_the_log(place)

    assert place.launch(crash_at="bare-metal.reclaim.directory").wait_dead() == -signal.SIGKILL
    second = place.start(crash_at="bare-metal.reclaim.killed")
    assert left(place) == [living], "what was dead is gone before anything is asked"
    (machine,) = place.ask("orphans")["machines"]
    assert (machine["vm"], machine["status"], machine["pid"]) == (living, "orphaned", pids[living])
    with place.asking("orphans", "--stop", "--yes"):
        assert second.wait_dead() == -signal.SIGKILL
    wait_until(lambda: not lives(pids[living]), "it is ended")
    place.start()
    assert left(place) == [], "the next start finishes it"
    assert place.ask("orphans", "--all")["machines"] == []
    assert place.ask("reap")["findings"] == []
    place.assert_no_agent_is_left()
    for coordinator in place.coordinators:
        if coordinator.process.poll() is None:
            coordinator.stop()

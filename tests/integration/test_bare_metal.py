"""Host processes that misbehave: each ends in the right fact and leaves nothing on the host."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from actors.errors import DriverError
from infra.drivers.bare_metal.nursery import CannotBear, Nursery
from infra.host_process import process
from infra.host_process.cgroup import Cgroup
from tests.contract.driver_rigs import Ends, wait_until
from tests.integration.bare_metal_site import VM, Site, alive
from tests.needed import need_root

NEVER = threading.Event()
SLEEP = "while :; do sleep 600 & wait; done"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.script(SLEEP)
    yield made
    made.clean()
    made.assert_nothing_is_left()


@pytest.fixture(params=["auto", "none"])
def either(request: pytest.FixtureRequest, site: Site) -> Site:
    """Return the site with and without cgroups."""
    cgroup: Literal["auto", "none"] = request.param
    site.configure(cgroup=cgroup)
    return site


def test_one_that_ignores_sigterm_is_killed_after_the_grace(either: Site) -> None:
    either.script("trap '' TERM; echo > ready; while :; do sleep 600 & wait; done")
    driver = either.driver()
    placement, handle = either.spawn(driver)
    either.wait_for("ready")
    evidence = driver.destroy(VM, placement, handle, NEVER)
    assert "SIGKILL 0.3 s after SIGTERM" in evidence
    assert not alive(handle.data["pid"])


def test_one_that_heeds_sigterm_gets_to_clean_up(either: Site) -> None:
    marker = either.root / "cleaned"
    either.script(f"trap 'echo > {marker}; exit 0' TERM; echo > ready; {SLEEP}")
    driver = either.driver()
    placement, handle = either.spawn(driver)
    either.wait_for("ready")
    evidence = driver.destroy(VM, placement, handle, NEVER)
    assert marker.exists()
    assert "SIGKILL" not in evidence


def test_a_double_fork_that_escapes_the_session_is_ended_too(either: Site) -> None:
    either.script("setsid sh -c 'trap \"\" TERM; (sleep 600 & echo $! > escaped; wait) &'; exit 0")
    driver = either.driver()
    placement, handle = either.spawn(driver)
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    escaped = int(either.wait_for("escaped"))
    assert ends.wait().exit_code == 0, "the end of the main process is the end of the machine"
    assert alive(escaped)
    assert os.getsid(escaped) != handle.data["pid"]
    assert driver.inspect(VM, placement, handle).presence == "half-made"
    driver.destroy(VM, placement, handle, NEVER)
    assert not alive(escaped)


def test_where_none_can_be_born_in_a_cgroup_it_joins_before_it_becomes_the_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root()

    def refuse(*_: object, **__: object) -> None:
        raise CannotBear("Function not implemented")

    monkeypatch.setattr(Nursery, "bear", refuse)
    driver = site.driver()
    placement, handle = site.spawn(driver)
    assert driver.nursery_pid is None
    assert placement["cgroup"] in Path(f"/proc/{handle.data['pid']}/cgroup").read_text()
    driver.destroy(VM, placement, handle, NEVER)


def test_agents_outlive_the_nursery_and_a_new_one_takes_over(site: Site) -> None:
    need_root()
    driver = site.driver()
    placement, handle = site.spawn(driver)
    assert driver.nursery_pid is not None
    os.kill(driver.nursery_pid, signal.SIGKILL)
    wait_until(lambda: not alive(driver.nursery_pid or 0), "the nursery is gone")
    assert driver.inspect(VM, placement, handle).presence == "running"
    _, second = site.spawn(driver, "vm-02")
    assert alive(second.data["pid"])
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    os.kill(handle.data["pid"], signal.SIGTERM)
    assert ends.wait().exit_code == -signal.SIGTERM, "an agent is our own child, not the nursery's"


def test_without_cgroup_kill_every_member_is_killed_through_its_pidfd(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root()
    monkeypatch.setattr(Cgroup, "kill", lambda _: False)
    site.script("trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 600 & sleep 600 & echo > ready; wait'")
    driver = site.driver()
    placement, handle = site.spawn(driver)
    site.wait_for("ready")
    assert "SIGKILL" in driver.destroy(VM, placement, handle, NEVER)


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (lambda agent: agent.unlink(), "missing"),
        (lambda agent: (agent.unlink(), agent.mkdir()), "missing"),
        (lambda agent: agent.chmod(0o644), "refused"),
        (lambda agent: agent.write_text("#!/no/such/interpreter\n"), "missing"),
        (lambda agent: agent.write_text("neither program nor script"), "refused"),
    ],
    ids=["missing", "directory", "not-executable", "no-interpreter", "no-format"],
)
def test_a_program_that_cannot_run_is_refused_at_once_and_for_good(
    site: Site, prepare: object, kind: str
) -> None:
    assert callable(prepare)
    prepare(site.agent)
    driver = site.driver()
    with pytest.raises(DriverError) as refused:
        site.spawn(driver)
    assert (refused.value.kind, refused.value.transient) == (kind, False)
    assert str(site.agent) in str(refused.value)
    assert site.survey(driver) == []


def test_a_relative_program_is_refused(site: Site) -> None:
    site.label_set(binary_path="agent")
    with pytest.raises(DriverError, match="absolute"):
        site.spawn(site.driver())


def test_a_program_that_vanishes_at_the_last_moment_is_refused(either: Site) -> None:
    driver = either.driver(
        reach=lambda point: either.agent.unlink() if point == "bare-metal.spawn.cgroup" else None
    )
    with pytest.raises(DriverError, match="could not be executed") as refused:
        either.spawn(driver)
    assert refused.value.kind == "refused"


def test_a_missing_working_directory_is_told_by_name(site: Site) -> None:
    site.label_set(working_dir="/no/such/directory")
    with pytest.raises(DriverError, match="/no/such/directory") as refused:
        site.spawn(site.driver())
    assert not refused.value.transient


@pytest.mark.parametrize(("text", "code"), [("exit 7", 7), ("exit 0", 0), ("kill -KILL $$", -9)])
def test_an_instant_exit_is_told_with_its_code(either: Site, text: str, code: int) -> None:
    either.script(f"echo last words; {text}")
    driver = either.driver()
    placement, handle = either.spawn(driver)
    ends = Ends()
    driver.watch(VM, placement, handle, ends)
    assert ends.wait().exit_code == code
    assert driver.log_tail(VM, placement, 5) == ("last words",)
    driver.destroy(VM, placement, handle, NEVER)
    assert driver.log_tail(VM, placement, 5) == ("last words",), "what it wrote is kept, within bounds"


def test_it_gets_an_allow_listed_environment_and_its_label_sets_last(site: Site) -> None:
    ambient = {
        "PATH": os.environ["PATH"],
        "LANG": "C",
        "FLEETLOG_POSTGRES_PASSWORD": "hunter2",
        "AWS_SECRET": "s3",
    }
    site.label_set(
        binary_path="/bin/sleep", args=("600",), env={"A": "label-set", "LANG": "C.UTF-8", "bad-name": "x"}
    )
    site.configure(forwarded={"A": "forwarded", "B": "forwarded", "C": "forwarded"})
    driver = site.driver(ambient=ambient)
    _, handle = site.spawn(driver, B="agent", A="agent")
    raw = Path(f"/proc/{handle.data['pid']}/environ").read_bytes().decode()
    seen = dict(item.split("=", 1) for item in raw.split("\0") if item)
    cookie = seen.pop("FLEETLOG_RUN")
    seen.pop("PWD", None)  # a shell's own
    assert seen == {
        "PATH": ambient["PATH"],
        "LANG": "C.UTF-8",
        "A": "label-set",
        "B": "agent",
        "C": "forwarded",
    }
    assert len(cookie) == 32


def test_a_trusted_environment_still_hides_our_own_secrets(site: Site) -> None:
    site.label_set(binary_path="/bin/sleep", args=("600",))
    site.configure(trusted_environment=True)
    driver = site.driver(ambient={"AWS_REGION": "x", "FLEETLOG_POSTGRES_PASSWORD": "hunter2"})
    _, handle = site.spawn(driver)
    raw = Path(f"/proc/{handle.data['pid']}/environ").read_bytes()
    assert b"AWS_REGION=x" in raw
    assert b"hunter2" not in raw


def test_it_leads_a_group_and_session_of_its_own_and_inherits_nothing_of_ours(site: Site) -> None:
    site.label_set(binary_path="/bin/sleep", args=("600",))
    ours = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(ours, True)  # noqa: FBT003
    _, handle = site.spawn(site.driver())
    pid = handle.data["pid"]
    assert os.getpgid(pid) == os.getsid(pid) == pid != os.getpgid(0)
    expected = {0: "/dev/null", 1: handle.data["log"], 2: handle.data["log"]}
    # the loader opens libraries for a moment; one of ours would stay
    wait_until(lambda: open_files(pid) == expected, f"{expected} is all it has open")
    os.close(ours)
    assert process.executable(pid) == handle.data["executable"]


def open_files(pid: int) -> dict[int, str]:
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[int(path.name)] = str(path.readlink())
    return found


def test_a_flood_of_output_takes_neither_the_disk_nor_a_pipe(site: Site) -> None:
    bound = 256 * 1024
    site.configure(live_log_bytes=bound)
    site.script(
        "head -c 20000000 /dev/zero | tr '\\0' x; yes line | head -n 100000; echo end; echo > ready; sleep 600"
    )
    lines: list[str] = []
    driver = site.driver(sink=lambda _, line: lines.append(line))
    placement, handle = site.spawn(driver)
    site.wait_for("ready")
    output = Path(handle.data["log"])
    assert output.stat().st_size > 20_000_000
    wait_until(lambda: output.stat().st_blocks * 512 <= bound, "its disk use came down to the bound")
    assert driver.log_tail(VM, placement, 1) == ("end",)
    wait_until(lambda: "end" in lines, "the last line was passed on")
    assert max(len(line) for line in lines) < 66_000


def test_output_is_passed_on_across_a_restart_without_a_gap_or_a_repeat(site: Site) -> None:
    site.script(
        "n=0; while [ $n -lt 400 ]; do echo $n; n=$((n+1)); sleep 0.002; done; echo > ready; sleep 600"
    )
    first_lines: list[str] = []
    first = site.driver(sink=lambda _, line: first_lines.append(line))
    placement, handle = site.spawn(first)
    wait_until(lambda: len(first_lines) > 20, "some lines came")
    first.close()
    second_lines: list[str] = []
    second = site.driver(sink=lambda _, line: second_lines.append(line))
    second.watch(VM, placement, handle, Ends())
    site.wait_for("ready")
    second.destroy(VM, placement, handle, NEVER)
    assert second_lines
    numbers = [
        line for line in first_lines + second_lines if line.isdecimal()
    ]  # a shell may say "Terminated"
    assert numbers == [str(n) for n in range(400)]

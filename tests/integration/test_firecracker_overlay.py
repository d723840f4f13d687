"""Overlay templates with a real mkfs: built once, whole or not at all, and never by a spawn."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.errors import DriverError
from infra.drivers.firecracker import overlay, paths
from infra.drivers.firecracker.overlay import Templates
from infra.network.commands import Commands
from tests.contract.driver_rigs import wait_until
from tests.needed import need_packages

NEVER = threading.Event()
MIB = 16


@pytest.fixture(autouse=True)
def formatter() -> None:
    need_packages("mkfs.ext4")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Count what is run."""
    made: list[tuple[str, ...]] = []
    real = Commands.run

    def run(self: Commands, *arguments: str, stdin: str = "", timeout_s: float = 30) -> str:
        made.append(arguments)
        return real(self, *arguments, stdin=stdin, timeout_s=timeout_s)

    monkeypatch.setattr(Commands, "run", run)
    return made


def left(base: Path) -> list[str]:
    return sorted(path.name for path in paths.template(base, MIB).parent.iterdir())


def test_many_who_want_it_at_once_share_one_build(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    templates = Templates(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: templates.get(MIB, NEVER), range(8)))
    assert found == {paths.template(tmp_path, MIB)}
    assert len(calls) == 1
    assert left(tmp_path) == [f"overlay-{MIB}mib.ext4"]
    subprocess.run(["e2fsck", "-fn", found.pop()], check=True, capture_output=True, timeout=30)


def test_a_template_that_is_there_is_not_built_again_and_a_broken_one_is(
    tmp_path: Path, calls: list[tuple[str, ...]]
) -> None:
    templates = Templates(str(tmp_path))
    path = templates.get(MIB, NEVER)
    Templates(str(tmp_path)).get(MIB, NEVER)
    assert len(calls) == 1
    os.truncate(path, 4096)
    Templates(str(tmp_path)).get(MIB, NEVER)
    assert len(calls) == 2
    assert overlay.valid(path, MIB)


def test_a_build_that_fails_leaves_nothing_tells_all_who_wait_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mkfs.ext4").write_text("#!/bin/sh\necho no blocks >&2\nexit 3\n")
    (folder / "mkfs.ext4").chmod(0o755)
    templates = Templates(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(DriverError, match=r"exited with 3 .*no blocks"):
            templates.get(MIB, NEVER)
        patched.setenv("PATH", "/nowhere")
        with pytest.raises(DriverError, match="apt-get install e2fsprogs"):
            templates.get(MIB, NEVER)
    assert left(tmp_path) == []
    assert overlay.valid(templates.get(MIB, NEVER), MIB)


def test_a_wait_for_a_template_can_be_called_off_and_the_build_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, abort = threading.Event(), threading.Event()
    real = overlay.make

    def slow(path: Path, mib: int) -> None:
        assert go_on.wait(20)
        real(path, mib)

    monkeypatch.setattr(overlay, "make", slow)
    templates = Templates(str(tmp_path))
    templates.prewarm({MIB})
    abort.set()
    with pytest.raises(DriverError) as caught:
        templates.get(MIB, abort)
    assert caught.value.kind == "aborted"
    go_on.set()
    wait_until(lambda: overlay.valid(paths.template(tmp_path, MIB), MIB), "it is built all the same")
    wait_until(lambda: not templates._building, "its builder is done")


def test_processes_that_race_all_leave_a_whole_one_and_a_killed_one_only_its_scraps(tmp_path: Path) -> None:
    path = paths.template(tmp_path, MIB)
    script = f"from pathlib import Path; from infra.drivers.firecracker import overlay; overlay.make(Path({str(path)!r}), {MIB})"
    racing = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [each.wait(50) for each in racing] == [0] * 4
    assert overlay.valid(path, MIB)
    scrap = path.with_name(f".{path.name}.1-dead")
    scrap.write_bytes(b"half")
    os.utime(scrap, (0, 0))
    fresh = path.with_name(f".{path.name}.2-alive")
    fresh.write_bytes(b"half")
    path.unlink()
    overlay.make(path, MIB)
    assert left(tmp_path) == [fresh.name, path.name]

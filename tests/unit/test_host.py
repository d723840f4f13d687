"""The host: a name that is legal in a subject, one boot, and room on the disk or a clear word."""

import platform
import socket
from pathlib import Path

import pytest

from actors.decisions.labels import Host
from events.subjects import NAME
from infra.host import DiskFull, boot_id, check_disk, host_name, platform_labels


def test_a_given_name_is_kept_or_refused_with_the_form() -> None:
    assert host_name("build-7") == "build-7"
    with pytest.raises(ValueError, match="host 'Build 7': use 1 to 63 lowercase letters"):
        host_name("Build 7")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("build7", "build7"),
        ("Build_7.example.net", "build-7"),
        ("--odd--", "odd"),
        ("é", "localhost"),
        ("", "localhost"),
        ("x" * 80, "x" * 63),
    ],
)
def test_the_kernels_name_is_made_legal(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: kernel)
    assert host_name() == name
    assert NAME.fullmatch(host_name())


def test_the_boot_id_is_the_same_for_the_whole_boot() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


@pytest.mark.parametrize(
    ("machine", "arch"), [("x86_64", "x64"), ("aarch64", "arm64"), ("riscv64", "riscv64")]
)
def test_the_platform_is_named_as_labels_name_it(
    machine: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert platform_labels() == Host(os="linux", arch=arch)


def test_room_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    free = check_disk(tmp_path / "not" / "there" / "yet", least_bytes=1)
    assert free > 0
    assert not (tmp_path / "not").exists()


def test_too_little_room_names_the_folder_the_need_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=rf"{tmp_path} has \d+ MiB free.*free some.*--data-dir"):
        check_disk(tmp_path, least_bytes=1 << 60)

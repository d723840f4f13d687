"""The data directory: private, one coordinator at a time, and how the command line finds that one."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from infra.embedded.data_directory import DataDirectory
from infra.embedded.errors import DataDirectoryRefused


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_private_whatever_the_mask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with DataDirectory(tmp_path / "data") as data:
            assert mode(data.path) == 0o700
            assert mode(data.path / "lock") == 0o600
    finally:
        os.umask(mask)


def test_a_second_coordinator_is_told_who_has_it_and_may_have_it_after(tmp_path: Path) -> None:
    with (
        DataDirectory(tmp_path),
        pytest.raises(
            DataDirectoryRefused, match=f"{tmp_path} is in use by the coordinator with pid {os.getpid()}"
        ),
    ):
        DataDirectory(tmp_path)
    DataDirectory(tmp_path).close()


def test_the_refused_second_leaves_the_firsts_runtime_file_alone(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as data:
        published = data.publish_runtime(coordinator="one", nats_url="nats://127.0.0.1:1")
        with pytest.raises(DataDirectoryRefused):
            DataDirectory(tmp_path)
        assert DataDirectory.running(tmp_path) == published


def test_the_running_coordinator_is_found_until_it_stops(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as data:
        assert DataDirectory.running(tmp_path) is None
        published = data.publish_runtime(
            coordinator="one",
            nats_url="nats://127.0.0.1:4222",
            nats_creds=tmp_path / "operator.creds",
            postgres_dsn="postgresql:///fleetlog",
            http_address="127.0.0.1:8080",
        )
        assert published.pid == os.getpid()
        assert DataDirectory.running(tmp_path) == published
        assert mode(tmp_path / "runtime.json") == 0o600
    assert DataDirectory.running(tmp_path) is None
    assert not (tmp_path / "runtime.json").exists()


def test_a_killed_coordinators_folder_is_free_and_its_runtime_file_is_not_believed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from infra.embedded.data_directory import DataDirectory\n"
        "data = DataDirectory(Path(sys.argv[1]))\n"
        "data.publish_runtime(coordinator='one', nats_url='nats://127.0.0.1:1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "runtime.json").exists()
    assert DataDirectory.running(tmp_path) is None
    DataDirectory(tmp_path).close()


def test_a_folder_others_can_write_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DataDirectoryRefused, match="can be written by other users"):
        DataDirectory(tmp_path)
    assert mode(tmp_path) == 0o777
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DataDirectory(tmp_path).close()
    assert mode(tmp_path) == 0o755


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(DataDirectoryRefused, match="is not a folder"):
        DataDirectory(tmp_path / "data")


def test_a_place_nobody_can_make_a_folder_in_is_refused_by_name() -> None:
    with pytest.raises(DataDirectoryRefused, match=r"/proc/fleetlog cannot be used: .*--data-dir"):
        DataDirectory(Path("/proc/fleetlog"))

"""One process of a name at a time sweeps a folder, and a killed one blocks nobody."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import DriverError
from infra.owner_lock import OwnerLock

_HOLD = """
import sys
from pathlib import Path
from infra.owner_lock import OwnerLock
OwnerLock(Path(sys.argv[1]), "alpha").hold()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_of_the_name_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        lock = OwnerLock(folder, "alpha")
        with pytest.raises(
            DriverError, match=r"another process named alpha .* give each coordinator its own --id"
        ):
            lock.hold()
        OwnerLock(folder, "beta").hold()
        first.send_signal(signal.SIGKILL)
        first.wait()
    lock.hold()
    lock.hold()
    lock.close()
    lock.close()


def test_a_folder_that_cannot_be_written_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DriverError, match="nothing there is swept"):
        OwnerLock(tmp_path / "file" / "below", "alpha").hold()

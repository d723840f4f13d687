"""The tail of an untrusted file: bounded, complete, and taken up where it was left."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.file_tail import (
    CUT_MARKER,
    LINE_BYTES,
    QUEUE_LINES,
    SLICE_BYTES,
    FileTail,
    last_lines,
    whole_characters,
)
from infra.host_process.output import punch


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def drain(tail: FileTail) -> list[str]:
    lines = []
    while tail.poll():
        lines.extend(tail.take())
    return lines + tail.take()


def test_a_missing_file_is_no_data_and_its_later_lines_are_read(tmp_path: Path) -> None:
    tail = FileTail(tmp_path / "output")
    assert tail.poll() == 0
    append(tmp_path / "output", b"one\n\ntwo\nhal")
    assert drain(tail) == ["one", "two"]
    append(tmp_path / "output", b"f\n")
    assert drain(tail) == ["half"]
    tail.close()
    tail.close()


def test_a_flush_makes_the_unfinished_line_a_line(tmp_path: Path) -> None:
    append(tmp_path / "output", b"whole\npart")
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["whole"]
    tail.flush()
    assert tail.take() == ["part"]
    assert tail.position.offset == 10
    tail.close()


def test_a_line_over_the_limit_is_cut_with_a_marker_and_the_next_is_whole(tmp_path: Path) -> None:
    append(tmp_path / "output", b"x" * 70_000 + b"\nok\n")
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["x" * LINE_BYTES + CUT_MARKER, "ok"]
    tail.close()


def test_a_line_at_the_limit_is_not_cut(tmp_path: Path) -> None:
    append(tmp_path / "output", b"x" * LINE_BYTES + b"\n")
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["x" * LINE_BYTES]
    tail.close()


def test_an_unfinished_line_over_the_limit_is_cut_before_its_end_comes(tmp_path: Path) -> None:
    append(tmp_path / "output", b"x" * 70_000)
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["x" * LINE_BYTES + CUT_MARKER]
    append(tmp_path / "output", b"rest\nnext\n")
    assert drain(tail) == ["next"]
    tail.close()


def test_too_many_waiting_lines_drop_the_oldest_behind_one_counting_marker(tmp_path: Path) -> None:
    append(tmp_path / "output", b"".join(b"%d\n" % n for n in range(10_005)))
    tail = FileTail(tmp_path / "output")
    while tail.poll():
        pass
    marker, *lines = tail.take(20_000)
    assert "6 lines dropped" in marker
    assert lines == [str(n) for n in range(6, 10_005)]
    assert len(lines) == QUEUE_LINES - 1
    append(tmp_path / "output", b"".join(b"%d\n" % n for n in range(10_004)))
    while tail.poll():
        pass
    marker, *lines = tail.take(20_000)
    assert "11 lines dropped" in marker, "the count is cumulative, and the marker does not count itself"
    assert lines[-1] == "10003"
    tail.close()


def test_one_poll_reads_at_most_a_slice_and_the_offset_counts_what_was_read(tmp_path: Path) -> None:
    append(tmp_path / "output", b"y" * (SLICE_BYTES - 1) + b"\n" + b"more\n")
    tail = FileTail(tmp_path / "output")
    assert tail.poll() == SLICE_BYTES
    assert tail.offset == SLICE_BYTES
    append(tmp_path / "output", b"appended while reading\n")
    assert drain(tail)[-2:] == ["more", "appended while reading"]
    assert tail.offset == (tmp_path / "output").stat().st_size
    tail.close()


def test_a_character_split_over_two_reads_survives(tmp_path: Path) -> None:
    text = "grün 🦀 язык\n".encode()
    tail = FileTail(tmp_path / "output", slice_bytes=1)
    lines = []
    for byte in text:
        append(tmp_path / "output", bytes([byte]))
        lines.extend(drain(tail))
    assert lines == ["grün 🦀 язык"]
    tail.close()


def test_a_cut_never_splits_a_character(tmp_path: Path) -> None:
    append(tmp_path / "output", ("a" + "🦀" * 20_000).encode() + b"\n")
    tail = FileTail(tmp_path / "output")
    (line,) = drain(tail)
    assert line.endswith("🦀" + CUT_MARKER)
    assert "\N{REPLACEMENT CHARACTER}" not in line
    tail.close()


@given(st.text(min_size=1, max_size=20), st.integers(min_value=1, max_value=80))
def test_any_cut_text_is_a_prefix_of_it(text: str, end: int) -> None:
    kept = whole_characters(text.encode()[:end]).decode()
    assert text.startswith(kept)


def test_bytes_that_are_no_text_become_replacement_characters(tmp_path: Path) -> None:
    append(tmp_path / "output", b"\xff\xfe\nfine\n")
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["\N{REPLACEMENT CHARACTER}" * 2, "fine"]
    tail.close()


def test_a_tail_taken_up_again_misses_and_repeats_no_line(tmp_path: Path) -> None:
    append(tmp_path / "output", b"one\ntwo\nthree\nunfini")
    first = FileTail(tmp_path / "output")
    first.poll()
    assert first.take(2) == ["one", "two"]
    append(tmp_path / "output", b"shed\n")
    second = FileTail(tmp_path / "output", first.position)
    assert drain(second) == ["three", "unfinished"]
    first.close()
    second.close()


def test_a_tail_taken_up_within_a_cut_line_does_not_call_its_rest_a_line(tmp_path: Path) -> None:
    append(tmp_path / "output", b"x" * 70_000)
    first = FileTail(tmp_path / "output")
    drain(first)
    append(tmp_path / "output", b"y" * 100)
    drain(first)
    append(tmp_path / "output", b"z\nnext\n")
    second = FileTail(tmp_path / "output", first.position)
    assert drain(second) == ["next"]
    first.close()
    second.close()


@given(
    pieces=st.lists(
        st.sampled_from([b"a", b"\n", b"bb\n", b"c" * 9, b"d" * 20, b"\n\n", "é".encode()]), max_size=30
    ),
    slice_bytes=st.integers(min_value=1, max_value=16),
    stop_after=st.integers(min_value=0, max_value=30),
)
def test_wherever_it_is_taken_up_the_lines_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], slice_bytes: int, stop_after: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "output"
    path.write_bytes(b"".join(pieces) + b"\n")
    whole = FileTail(path, line_bytes=8, slice_bytes=4096)
    expected = drain(whole)
    first = FileTail(path, line_bytes=8, slice_bytes=slice_bytes)
    lines = []
    for _ in range(stop_after):
        first.poll()
        lines.extend(first.take(1))
    second = FileTail(path, first.position, line_bytes=8, slice_bytes=slice_bytes)
    lines.extend(drain(second))
    assert lines == expected
    for tail in (whole, first, second):
        tail.close()


def test_an_unreadable_file_leaves_the_tail_alive(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.mkdir()
    tail = FileTail(path)
    assert tail.poll() == 0
    tail.close()
    path.rmdir()
    append(path, b"now\n")
    assert drain(tail) == ["now"]
    tail.close()


def test_a_gibibyte_without_a_newline_does_not_grow_our_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path / "output", b"x")
    size_bytes = 1 << 30

    def read(_: int, length: int, offset: int) -> bytes:
        return b"x" * min(length, size_bytes - offset)

    monkeypatch.setattr("infra.file_tail.os.pread", read)
    tail = FileTail(tmp_path / "output")
    tail.poll()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while tail.poll():
        pass
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert tail.offset == size_bytes
    assert grown_kib < 8 * 1024
    assert tail.take() == ["x" * LINE_BYTES + CUT_MARKER]
    tail.close()


def test_a_part_that_was_punched_out_is_skipped_with_a_marker(tmp_path: Path) -> None:
    path = tmp_path / "output"
    append(path, b"".join(b"line %06d\n" % n for n in range(10_000)))
    size_bytes = path.stat().st_size
    punch(str(path), 65_536)
    assert path.stat().st_size == size_bytes, "offsets stay what they were"
    tail = FileTail(path)
    marker, first, *_ = lines = drain(tail)
    assert "65536 bytes discarded" in marker
    assert first == f"line {65_536 // 12 + 1:06d}"
    assert lines[-1] == "line 009999"
    tail.close()


def test_zeros_that_were_written_are_data(tmp_path: Path) -> None:
    append(tmp_path / "output", b"\0\0\nafter\n")
    tail = FileTail(tmp_path / "output")
    assert drain(tail) == ["\0\0", "after"]
    tail.close()


def test_the_last_lines_are_the_last_and_no_more_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "output"
    assert last_lines(path, 5) == ()
    append(path, b"".join(b"%d\n" % n for n in range(1000)) + b"end")
    assert last_lines(path, 3) == ("998", "999", "end")
    assert last_lines(path, 0) == ()
    append(path, b"x" * 3_000_000)
    (line,) = last_lines(path, 1)
    assert len(line) == LINE_BYTES + len(CUT_MARKER)
    os.truncate(path, 0)
    assert last_lines(path, 5) == ()

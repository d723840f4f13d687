"""Ids: sorted by time, legal wherever they are used, and never met twice."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from events.subjects import VM_ID
from infra.ids import SystemIds

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def test_an_id_is_legal_for_the_jailer_and_as_one_subject_token() -> None:
    made = SystemIds().vm(NOW)
    assert VM_ID.fullmatch(made)
    assert len(made) == 28
    assert "." not in made


def test_ids_sort_by_time_whatever_chance_drew() -> None:
    ids = SystemIds()
    times = [NOW + timedelta(milliseconds=n) for n in range(500)]
    times += [NOW + timedelta(days=n) for n in range(1, 40_000, 997)]
    made = [ids.vm(at) for at in times]
    assert made == sorted(made)


def test_ids_of_one_millisecond_never_meet() -> None:
    ids = SystemIds()
    assert len({ids.vm(NOW) for _ in range(20_000)}) == 20_000


def test_the_part_that_is_time_depends_on_nothing_else() -> None:
    ids = SystemIds()
    assert ids.vm(NOW)[:12] == ids.vm(NOW)[:12]
    assert ids.vm(NOW)[12:] != ids.vm(NOW)[12:]


def test_attempts_are_128_bits_of_hex() -> None:
    ids = SystemIds()
    made = {ids.random() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", text) for text in made)


def test_attempts_never_meet_across_threads() -> None:
    ids = SystemIds()
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: ids.random(), range(20_000)))
    assert len(set(made)) == 20_000


def test_a_forked_child_draws_its_own_attempts() -> None:
    program = """
import os
from infra.ids import SystemIds
ids = SystemIds()
ids.random()
if os.fork():
    os.wait()
print(*(ids.random() for _ in range(300)), flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    made = ran.stdout.split()
    assert len(made) == 600
    assert len(set(made)) == 600

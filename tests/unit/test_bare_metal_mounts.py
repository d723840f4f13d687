"""Mount tables as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.host_process.cgroup import Mount
from infra.host_process.mountinfo import mounted
from infra.host_process.process import legal, parse_stat


def test_a_mount_is_read_with_its_optional_fields_and_escapes() -> None:
    text = (
        "36 35 0:29 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"
        "40 35 0:31 /my\\040root /mnt/a\\040b\\134ü rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    first, second = mounted(text)
    assert (first.point, first.root, first.file_system) == ("/sys/fs/cgroup", "/", "cgroup2")
    assert "nsdelegate" in first.options
    assert (second.point, second.root) == ("/mnt/a b\\ü", "/my root")
    assert {"cpu", "cpuacct"} <= second.options


@pytest.mark.parametrize(
    ("root", "path", "seen"),
    [
        ("/", "/fleetlog/c1/vm", "/cg/fleetlog/c1/vm"),
        ("/user.slice", "/user.slice/fleetlog/c1", "/cg/fleetlog/c1"),
        ("/user.slice", "/user.slice", "/cg"),
        ("/user.slice", "/user.slicer/fleetlog", None),
        ("/user.slice", "/fleetlog/c1", None),
    ],
)
def test_a_cgroup_is_looked_for_where_its_mount_shows_it(root: str, path: str, seen: str | None) -> None:
    at = Mount(point=Path("/cg"), root=root, kind="cgroup2").at(path)
    assert at == (None if seen is None else Path(seen))


def test_a_process_name_cannot_forge_its_start_time() -> None:
    rest = " ".join(["S", "1", "77", "78", *["0"] * 15, "4242", "0"])
    stat = parse_stat(f"123 (a) b) Z 9 9 9 (c) {rest}")
    assert stat is not None
    assert (stat.state, stat.group, stat.session, stat.start_ticks) == ("S", 77, 78, 4242)
    assert parse_stat("123 (a)") is None
    assert parse_stat("") is None


@pytest.mark.parametrize("pid", [0, 1, -1, -4242, True, "7", None, 2.0, 2**22 + 1])
def test_what_names_a_group_or_init_or_nothing_is_never_signalled(pid: object) -> None:
    assert not legal(pid)

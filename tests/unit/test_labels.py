"""Which label set takes a job, and why the others do not."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.decisions.labels import (
    Explanation,
    Host,
    Match,
    NoMatch,
    Platform,
    Role,
    RoutableScaler,
    Route,
    explain,
    host_of,
    label_key,
    match,
    normalise,
    routes,
)

LINUX = Host(os="linux", arch="x64")


def scaler(
    name: str,
    *label_sets: tuple[str, ...],
    backend: str = "container",
    mandatory: tuple[str, ...] = (),
    platform: Platform | None = None,
    roles: tuple[Role, ...] | None = None,
    retiring: bool = False,
    host: Host = LINUX,
) -> RoutableScaler:
    return RoutableScaler(
        name=name,
        backend=backend,
        label_sets=label_sets,
        mandatory_labels=mandatory,
        platform=platform,
        roles=roles,
        retiring=retiring,
        host=host,
    )


def taken_by(
    scalers: Sequence[RoutableScaler], labels: Iterable[str], exclude: Iterable[str] = ()
) -> str | None:
    found = match(scalers, labels, exclude)
    return f"{found.route.scaler}/{found.route.index}" if isinstance(found, Match) else None


def only_route(one: RoutableScaler) -> Route:
    (route,) = routes(one)
    return route


def test_labels_are_compared_lower_case_each_once_and_sorted() -> None:
    assert label_key(["Docker", "linux", "linux"]) == "docker,linux"
    assert label_key([]) == ""


@given(st.lists(st.text(max_size=6), max_size=6))
def test_normalising_twice_is_normalising_once_in_any_order(labels: list[str]) -> None:
    once = normalise(labels)
    assert normalise(once) == once == normalise(reversed(labels))


def test_a_job_goes_where_all_its_labels_are() -> None:
    two = [scaler("a", ("linux", "small"), ("linux", "big")), scaler("b", ("linux", "gpu"))]
    assert taken_by(two, ["linux", "small"]) == "a/0"
    assert taken_by(two, ["big"]) == "a/1"
    assert taken_by(two, ["GPU", "Linux"]) == "b/0"
    assert taken_by(two, ["linux", "tape"]) is None


def test_the_set_with_the_fewest_labels_wins_and_the_first_of_equals() -> None:
    assert taken_by([scaler("a", ("linux", "x", "y"), ("linux", "x"))], ["x"]) == "a/1"
    assert taken_by([scaler("a", ("x", "one")), scaler("b", ("x", "two"))], ["x"]) == "a/0"


def test_an_excluded_label_moves_the_job_to_the_next_set() -> None:
    two = [scaler("a", ("x",), ("x", "y"))]
    assert taken_by(two, ["x"], ["Y"]) == "a/0"
    assert taken_by(two, ["y"], ["x"]) is None
    assert taken_by([*two, scaler("b", ("x", "z"))], ["x"], ["fleetlog:scaler:a"]) == "b/0"


def test_a_gate_opens_only_to_jobs_that_ask_for_every_label_of_it() -> None:
    gated = [scaler("a", ("linux", "gpu", "lab"), mandatory=("GPU", "lab"))]
    assert taken_by(gated, ["linux"]) is None
    assert taken_by(gated, ["linux", "gpu"]) is None
    assert taken_by(gated, ["linux", "Gpu", "LAB"]) == "a/0"
    assert taken_by(gated, ["gpu", "lab"], ["linux"]) is None


def test_a_job_that_asks_for_nothing_gets_the_first_set_without_a_gate() -> None:
    gated = scaler("a", ("gpu",), mandatory=("gpu",))
    big_then_small = scaler("b", ("x", "y", "z"), ("x",))
    assert taken_by([gated, big_then_small], []) == "b/0"
    assert taken_by([gated, big_then_small], [], ["z"]) == "b/1"
    assert taken_by([gated], []) is None


def test_a_retiring_scaler_is_not_offered_and_not_listed_as_available() -> None:
    found = match([scaler("a", ("x",), retiring=True), scaler("b", ("y",))], ["x"])
    assert isinstance(found, NoMatch)
    assert found.available == (("b", ("y",)),)


def test_no_match_names_what_was_asked_and_what_there_is() -> None:
    found = match([scaler("a", ("Linux", "x")), scaler("b", ("y",))], ["tape"], ["y"])
    assert isinstance(found, NoMatch)
    assert found.message == (
        "no scaler takes a job that asks for [tape] and excludes [y]; there are: a [linux, x]; b [y]"
    )
    nothing = match([], ["tape"])
    assert isinstance(nothing, NoMatch)
    assert nothing.message.endswith("there are: no label sets at all")


@pytest.mark.parametrize(
    ("platform", "gate", "labels"),
    [
        (Platform(os="linux", arch="x64"), (), {"os:linux", "arch:x64", "arch:amd64"}),
        (Platform(os="linux", arch="arm64"), ("arm64",), {"os:linux", "arch:arm64", "arm64"}),
        (Platform(os="macos", arch="arm64"), ("arm64", "macos"), {"os:macos", "os:darwin", "arch:arm64"}),
        (Platform(os="windows", arch="x64"), ("windows",), {"os:windows", "os:win32", "arch:amd64"}),
    ],
)
def test_a_declared_platform_gives_labels_and_a_gate(
    platform: Platform, gate: tuple[str, ...], labels: set[str]
) -> None:
    route = only_route(scaler("a", ("x",), platform=platform, host=Host(os="macos", arch="arm64")))
    assert route.gate == gate
    assert labels <= route.enriched
    assert set(gate) <= set(route.agent_labels)


def test_only_host_processes_take_their_platform_from_the_host() -> None:
    arm = Host(os="macos", arch="arm64")
    metal = only_route(scaler("a", ("x",), backend="bare-metal", host=arm))
    assert metal.gate == ("arm64", "macos")
    assert "os:darwin" in metal.enriched
    machine = only_route(scaler("a", ("x",), backend="firecracker", host=Host(os="linux", arch="arm64")))
    assert machine.gate == ()
    assert {"os:linux", "arch:arm64"} <= machine.enriched


def test_a_host_we_do_not_know_gives_its_raw_words_and_no_gate() -> None:
    route = only_route(scaler("a", ("x",), backend="bare-metal", host=host_of("FreeBSD", "riscv64")))
    assert route.gate == ()
    assert {"os:freebsd", "arch:riscv64"} <= route.enriched


@pytest.mark.parametrize(
    ("system", "machine", "host"),
    [
        ("Linux", "x86_64", ("linux", "x64")),
        ("Darwin", "arm64", ("macos", "arm64")),
        ("Windows", "AMD64", ("windows", "x64")),
        ("Linux", "aarch64", ("linux", "arm64")),
    ],
)
def test_the_kernels_words_for_a_host_become_ours(system: str, machine: str, host: tuple[str, str]) -> None:
    assert host_of(system, machine) == Host(os=host[0], arch=host[1])


def test_each_set_of_a_mixed_scaler_stays_reachable() -> None:
    mixed = [scaler("a", ("linux", "ci"), ("Windows", "ci"), ("macos", "arm64", "ci"))]
    assert taken_by(mixed, ["linux", "ci"]) == "a/0"
    assert taken_by(mixed, ["windows", "ci"]) == "a/1"
    assert taken_by(mixed, ["macos", "arm64"]) == "a/2"
    assert taken_by(mixed, ["macos"]) is None


def test_the_agent_gets_declared_labels_its_origin_its_roles_and_its_taints() -> None:
    one = scaler(
        "box", ("Linux",), backend="event", platform=Platform(os="linux", arch="arm64"), roles=("builder",)
    )
    assert only_route(one).agent_labels == (
        "arm64",
        "fleetlog:agent:event",
        "fleetlog:role:builder",
        "fleetlog:scaler:box",
        "linux",
    )
    assert only_route(one).labels == ("linux",)


def test_no_roles_declared_means_every_role_and_an_empty_list_means_none() -> None:
    every, none = only_route(scaler("a", ("x",))), only_route(scaler("a", ("x",), roles=()))
    assert {"fleetlog:role:builder", "fleetlog:role:init-runner"} <= set(every.agent_labels)
    assert not [label for label in none.agent_labels if "role" in label]


def test_every_set_is_told_why_it_would_or_would_not_take_the_job() -> None:
    scalers = [
        scaler("a", ("x", "y"), ("x",), ("z",)),
        scaler("b", ("x", "gpu"), mandatory=("gpu",)),
        scaler("c", ("x", "bad")),
        scaler("d", ("x", "old"), retiring=True),
    ]
    told = explain(scalers, ["X"], ["bad"])
    assert [(each.scaler, each.index, each.verdict, each.labels) for each in told] == [
        ("a", 0, "less-specific", ("x", "y")),
        ("a", 1, "chosen", ("x",)),
        ("a", 2, "missing-labels", ("x",)),
        ("b", 0, "gated", ("gpu",)),
        ("c", 0, "excluded", ("bad",)),
        ("d", 0, "retiring", ()),
    ]
    assert told[0].reason == "it would take the job; a label_sets[1] comes first"
    assert told[3].reason == "it only takes jobs that ask for [gpu]"


words = st.sampled_from(["linux", "Windows", "macos", "arm64", "gpu", "GPU", "big", "x", "y"])
label_sets = st.lists(words, min_size=1, max_size=4).map(tuple)
platforms = st.none() | st.builds(
    Platform, os=st.sampled_from(["linux", "macos", "windows"]), arch=st.sampled_from(["x64", "arm64"])
)
scalers = st.lists(
    st.builds(
        RoutableScaler,
        name=st.sampled_from(["a", "b", "c"]),
        backend=st.sampled_from(["bare-metal", "container", "event"]),
        label_sets=st.lists(label_sets, min_size=1, max_size=3).map(tuple),
        mandatory_labels=st.lists(words, max_size=2).map(tuple),
        platform=platforms,
        retiring=st.booleans(),
        host=st.sampled_from([LINUX, Host(os="macos", arch="arm64"), Host(os="plan9", arch="mips")]),
    ),
    max_size=4,
)
asked = st.lists(words, max_size=4)


@given(scalers, asked, asked)
def test_a_match_has_all_that_was_asked_nothing_refused_and_an_open_gate(
    offered: list[RoutableScaler], labels: list[str], exclude: list[str]
) -> None:
    wanted, refused = set(normalise(labels)), set(normalise(exclude))
    fitting = [
        route
        for one in offered
        if not one.retiring
        for route in routes(one)
        if wanted <= route.enriched and not refused & route.enriched and set(route.gate) <= wanted
    ]
    found = match(offered, labels, exclude)
    if isinstance(found, NoMatch):
        assert not fitting
        return
    assert found.route in fitting
    if wanted:
        assert len(found.route.enriched) == min(len(route.enriched) for route in fitting)
    else:
        assert found.route == fitting[0]


@given(scalers, asked, asked)
def test_an_explanation_agrees_with_the_match(
    offered: list[RoutableScaler], labels: list[str], exclude: list[str]
) -> None:
    told: Sequence[Explanation] = explain(offered, labels, exclude)
    assert len(told) == sum(len(one.label_sets) for one in offered)
    chosen = {(each.scaler, each.label_set) for each in told if each.verdict == "chosen"}
    found = match(offered, labels, exclude)
    if isinstance(found, Match):
        assert chosen == {(found.route.scaler, found.route.labels)}
        assert any(each.verdict == "chosen" for each in told)
    else:
        assert not [each for each in told if each.verdict in {"chosen", "less-specific"}]


@given(scalers)
def test_an_agent_can_do_every_job_its_gate_let_through(offered: list[RoutableScaler]) -> None:
    for one in offered:
        for route in routes(one):
            reachable = set(route.gate) <= route.enriched
            carried = set(route.gate) <= set(route.agent_labels)
            assert reachable == carried

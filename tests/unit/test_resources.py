"""Memory strings and the cascade of resources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.decisions.resources import (
    MEMORY_MOST_BYTES,
    ResourceSpec,
    format_memory,
    parse_memory,
    request_over_limit,
    resolve,
)
from events.envelope import Resources

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512m", 536870912),
        ("2G", 2147483648),
        ("1024k", 1048576),
        ("1.5g", 1610612736),
        ("1 g", 1073741824),
        ("0.0001k", 0),
        ("1.1k", 1126),
        ("0.3g", 322122547),
    ],
)
def test_memory_strings_are_binary_multiples_floored_to_whole_bytes(text: str, size_bytes: int) -> None:
    assert parse_memory(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "4Gi",
        "512",
        "",
        "5t",
        "-1g",
        "1g\n",
        " 1g",
        "1  g",
        "1.g",
        ".5g",
        "1e3m",
        "1\u212a",
        "\u0661g",
        "9" * 5000 + "g",
    ],
)
def test_anything_else_is_refused_with_the_value_and_the_accepted_form(text: str) -> None:
    with pytest.raises(ValueError, match="use a number and one of k, m, g") as caught:
        parse_memory(text)
    assert repr(text[:40]) in str(caught.value)


def test_more_memory_than_any_machine_has_is_refused() -> None:
    assert parse_memory(f"{2**32}g") == MEMORY_MOST_BYTES
    with pytest.raises(ValueError, match="more memory than any machine"):
        parse_memory(f"{2**32 + 1}g")


@given(st.integers(1, 2**40))
def test_whole_kibibytes_survive_being_shown_and_read(kibibytes: int) -> None:
    assert parse_memory(format_memory(kibibytes * 1024)) == kibibytes * 1024


@given(st.text(max_size=12))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert parse_memory(text) >= 0
    except ValueError as error:
        assert "use a number" in str(error)  # noqa: PT017 - both outcomes are right, a third is not


def test_only_requests_are_copied_to_the_limits_and_the_other_way_round() -> None:
    some = Resources(cpus=2, memory_bytes=GIB)
    both = ResourceSpec(requests=some, limits=some)
    assert resolve(ResourceSpec(requests=some), None, None) == both
    assert resolve(None, ResourceSpec(limits=some), None) == both


def test_what_nobody_declares_stays_undeclared() -> None:
    assert resolve(None, ResourceSpec(), None) == ResourceSpec()
    assert resolve(ResourceSpec(limits=Resources(cpus=1)), None, None).limits.memory_bytes == 0


def test_the_cascade_goes_field_by_field_and_side_by_side() -> None:
    job = ResourceSpec(requests=Resources(cpus=2))
    label_set = ResourceSpec(requests=Resources(cpus=3, memory_bytes=GIB), limits=Resources(cpus=4))
    defaults = ResourceSpec(
        requests=Resources(cpus=1, memory_bytes=1), limits=Resources(cpus=1, memory_bytes=3 * GIB)
    )
    assert resolve(job, label_set, defaults) == ResourceSpec(
        requests=Resources(cpus=2, memory_bytes=GIB), limits=Resources(cpus=4, memory_bytes=3 * GIB)
    )


def test_where_levels_contradict_each_other_the_nearer_one_wins() -> None:
    defaults = ResourceSpec(requests=Resources(cpus=2), limits=Resources(cpus=2))
    bigger = resolve(ResourceSpec(requests=Resources(cpus=4)), None, defaults)
    assert (bigger.requests.cpus, bigger.limits.cpus) == (4, 4)
    smaller = resolve(None, ResourceSpec(limits=Resources(cpus=1)), defaults)
    assert (smaller.requests.cpus, smaller.limits.cpus) == (1, 1)


quantities = st.builds(
    Resources, cpus=st.sampled_from([0.0, 0.5, 1.0, 4.0]), memory_bytes=st.sampled_from([0, 1, GIB, 3 * GIB])
)
specs = st.builds(ResourceSpec, requests=quantities, limits=quantities)


@given(st.none() | specs, st.none() | specs, st.none() | specs)
def test_a_resolved_request_never_exceeds_its_limit_and_sides_agree_on_what_is_declared(
    job: ResourceSpec | None, label_set: ResourceSpec | None, defaults: ResourceSpec | None
) -> None:
    spec = resolve(job, label_set, defaults)
    assert request_over_limit(spec) is None
    assert (spec.requests.cpus > 0) == (spec.limits.cpus > 0)
    assert (spec.requests.memory_bytes > 0) == (spec.limits.memory_bytes > 0)
    assert resolve(spec, None, None) == spec


def test_a_declaration_that_contradicts_itself_is_told_where() -> None:
    spec = ResourceSpec(
        requests=Resources(cpus=4, memory_bytes=2 * GIB), limits=Resources(cpus=2, memory_bytes=GIB)
    )
    assert request_over_limit(spec) == "requests 4 cpus, limit 2; requests 2g of memory, limit 1g"

"""Subject names: what may be one, and what falls under a wildcard."""

import pytest

from events import subjects


@pytest.mark.parametrize(
    ("pattern", "aggregate", "falls_under"),
    [
        ("vm.>", "vm.a", True),
        ("vm.>", "vm", False),
        ("vm.>", "vmx.a", False),
        ("backend.*", "backend.small", True),
        ("backend.*", "backend.one.small", False),
        ("backend.*.small", "backend.one.small", True),
        ("backend.>", "backend.one.small", True),
        (">", "vm.a", True),
        ("vm.a", "vm.a", True),
        ("vm.a", "vm.b", False),
    ],
)
def test_an_aggregate_falls_under_a_wildcard_as_on_the_server(
    *, pattern: str, aggregate: str, falls_under: bool
) -> None:
    assert subjects.matches(pattern, aggregate) is falls_under


@pytest.mark.parametrize("name", ["", "-a", "A", "a.b", "a b", "a*", "a" * 64])
def test_a_name_that_is_no_subject_token_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 63 lowercase letters"):
        subjects.checked(name, "cluster")

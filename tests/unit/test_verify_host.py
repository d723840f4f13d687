"""`verify` against a host: what the log says is compared with what drivers find, twice."""

import pytest

from actors.driver import Resource
from actors.errors import DriverError
from infra.verify import verify_host
from tests.fleet_log import ListLog, Story


def resource(vm: str | None, name: str = "cgroup-1") -> Resource:
    return Resource(kind="cgroup", name=name, vm=vm, owner="alpha")


@pytest.fixture
def story() -> Story:
    """One machine that runs, one that is reaped, one that was only requested."""
    story = Story(1)
    story.finish(story.begin(straight=True), 3)
    story.finish(story.begin(straight=True))
    story.begin(straight=True)
    return story


def kinds(story: Story, *found: Resource, host: str = "alpha-host") -> list[tuple[str, str]]:
    differences = verify_host(ListLog(story.facts), host, {"bare-metal": lambda: found})
    return [(difference.kind, difference.key) for difference in differences]


def test_a_host_as_the_log_has_it_is_in_order(story: Story) -> None:
    assert kinds(story, resource("vm-0000001"), resource("vm-0000001", "directory")) == []


def test_a_machine_that_is_gone_is_absent(story: Story) -> None:
    assert kinds(story) == [("absent", "vm-0000001")]


def test_what_is_left_of_a_reaped_machine_is_a_leftover(story: Story) -> None:
    assert kinds(story, resource("vm-0000001"), resource("vm-0000002", "x")) == [("leftover", "cgroup x")]


def test_what_the_log_never_heard_of_and_what_nobody_owns_are_told_apart(story: Story) -> None:
    found = kinds(story, resource("vm-0000001"), resource("vm-9", "x"), resource(None, "y"))
    assert found == [("not-in-log", "cgroup x"), ("unowned", "cgroup y")]


def test_a_machine_of_another_host_is_not_missed_here(story: Story) -> None:
    assert kinds(story, host="elsewhere") == []


def test_a_survey_that_failed_is_a_difference_and_proves_nothing_absent(story: Story) -> None:
    def survey() -> tuple[Resource, ...]:
        raise DriverError("unreachable", "no answer", transient=True)

    found = verify_host(ListLog(story.facts), "alpha-host", {"bare-metal": survey})
    assert [(difference.kind, difference.detail) for difference in found] == [("not-surveyed", "no answer")]


def test_a_machine_that_was_reaped_between_the_two_looks_is_no_difference(story: Story) -> None:
    log = ListLog(story.facts)
    looks = [(resource("vm-0000001"), resource("vm-0000002", "x")), (resource("vm-0000001"),)]

    def survey() -> tuple[Resource, ...]:
        return looks.pop(0)

    assert verify_host(log, "alpha-host", {"bare-metal": survey}) == []
    assert looks == []

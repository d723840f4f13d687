"""The log that contract tests run on: in memory, and on a NATS server of the test's own."""

from collections.abc import Iterator

import pytest

from tests.contract.journal_rigs import MemoryRig, NatsRig, Rig


@pytest.fixture(params=["memory", "nats"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Each journal in turn, with its faults."""
    if request.param == "memory":
        made: Rig = MemoryRig()
    else:
        made = NatsRig(request.getfixturevalue("own_nats_server"))
    yield made
    made.close()

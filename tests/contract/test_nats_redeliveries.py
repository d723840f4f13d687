"""What a durable consumer was delivered again is counted by its name; our own readers are no durable consumers."""

import asyncio
from collections.abc import Callable, Iterator

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from events import subjects
from tests.conftest import NatsServer
from tests.contract.journal_rigs import NatsRig, append, first


@pytest.fixture
def rig(own_nats_server: NatsServer) -> Iterator[NatsRig]:
    made = NatsRig(own_nats_server)
    yield made
    made.close()


async def _take_twice(server: NatsServer, cluster: str, looked: Callable[[], None]) -> None:
    client = await nats.connect(server.url, user_credentials=str(server.creds_path))
    try:
        config = ConsumerConfig(durable_name="provisioner", ack_policy=AckPolicy.EXPLICIT, ack_wait=30)
        consumer = await client.jetstream().pull_subscribe(
            subjects.whole_log(cluster), durable="provisioner", config=config, stream=subjects.stream(cluster)
        )
        (message,) = await consumer.fetch(1, timeout=5)
        await message.nak()
        (message,) = await consumer.fetch(1, timeout=5)
        await asyncio.to_thread(looked)
        await message.ack_sync(timeout=5)
    finally:
        await client.close()


def test_messages_delivered_again_are_counted_by_consumer(rig: NatsRig) -> None:
    append(rig.journal, first("vm.a"))
    assert rig.journal.redeliveries() == {}
    follow = rig.journal.follow(0, lambda _: None)
    seen: list[dict[str, int]] = []
    asyncio.run(_take_twice(rig.server, rig.cluster, lambda: seen.append(rig.journal.redeliveries())))
    follow.stop()
    assert seen == [{"provisioner": 1}]
    assert rig.journal.redeliveries() == {"provisioner": 0}

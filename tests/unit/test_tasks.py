"""Tasks are ended, also those that lose a cancellation."""

import asyncio
import time
from datetime import UTC, datetime

import pytest

from infra import tasks
from infra.agent import uplink
from infra.agent.bootstrap import Bootstrap
from infra.agent.life import Life, Patience
from infra.credentials import ACCOUNT, AccountSigner, new_seed, public_key


async def stubborn(cancellations: int, seen: list[int]) -> None:
    """Try on and on, and lose the first cancellations, as `asyncio.wait_for` before Python 3.12 can."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(1)
            if len(seen) > cancellations:
                raise


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel again soon."""
    monkeypatch.setattr(tasks, "AGAIN_S", 0.05)


def test_a_task_that_loses_a_cancellation_is_cancelled_until_it_ends() -> None:
    seen: list[int] = []

    async def play() -> None:
        started = [asyncio.create_task(stubborn(lost, seen)) for lost in (0, 3)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await tasks.end(started)
        assert all(task.cancelled() for task in started)

    asyncio.run(play())
    assert len(seen) >= 4


def test_what_a_task_raises_while_it_ends_is_dropped_and_no_tasks_are_fine() -> None:
    async def fails() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError

    async def play() -> None:
        await tasks.end(())
        failing = asyncio.create_task(fails())
        await asyncio.sleep(0)
        await tasks.end([failing])
        assert failing.done()

    asyncio.run(play())


def test_an_agent_gives_up_in_time_though_its_client_loses_a_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[int] = []

    class Client:
        """A client that never gets through, and makes a cancellation into a failure once."""

        is_closed = True

        async def connect(self, **_: object) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if not lost:
                    lost.append(1)
                    raise ConnectionError from None
                raise

        async def close(self) -> None:
            pass

    monkeypatch.setattr(uplink, "Client", Client)
    seed = new_seed(ACCOUNT)
    account = AccountSigner(seed=seed, account_public=public_key(seed))
    bootstrap = Bootstrap(
        id="vm-1",
        cluster="test",
        nats_url="nats://127.0.0.1:4222",
        labels=(),
        credential=account.mint(name="vm-1", issued_at=datetime(2026, 11, 1, tzinfo=UTC)),
    )

    async def play() -> int:
        async with asyncio.timeout(10):
            return await Life(bootstrap, ("true",), {}, Patience(register_s=0.1)).run()

    began = time.monotonic()
    assert asyncio.run(play()) == 4
    assert lost, f"no cancellation was lost in {time.monotonic() - began} s"

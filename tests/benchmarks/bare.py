"""The baselines: what nats-py, a plain socket and the kernel do when nobody decides, folds or guards anything.

Streams are made with the log's own settings, on the same server: every acknowledged write is synced, here as there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from events import subjects
from events.codec import Form
from infra.journal.address import NatsAddress
from infra.journal.jetstream import call
from infra.journal.stream import open_stream
from infra.journal.wire import Wire, publication

T = TypeVar("T")
_API = "$JS.API"
_ASKED = 10_000
_LIMIT_BYTES = 1 << 30


def make_stream(address: NatsAddress, cluster: str) -> None:
    """Make a stream like the log of `cluster`."""
    with Wire(address, name="baseline") as wire:
        open_stream(wire, cluster, limit_bytes=_LIMIT_BYTES, replicas=1)


def with_client(address: NatsAddress, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run `work` on a nats-py client of its own loop."""

    async def run() -> T:
        client = await nats.connect(address.url, user_credentials=str(address.creds), pending_size=64 << 20)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def publish_one_by_one(
    address: NatsAddress, cluster: str, payload: bytes, count: int, *, guarded: bool = False
) -> float:
    """Return publishes a second of `js.publish`, each acknowledged before the next; `guarded` as in `_batch`."""

    async def work(client: Client) -> float:
        stream = client.jetstream()
        subject = subjects.log(cluster, f"vm.{secrets.token_hex(4)}")
        began = time.perf_counter()
        for number in range(count):
            own = f"{subject}-{number}" if guarded else subject
            headers = {"Nats-Msg-Id": own, "Nats-Expected-Last-Subject-Sequence": "0"} if guarded else None
            await stream.publish(own, payload, headers=headers)
        return count / (time.perf_counter() - began)

    return with_client(address, work)


def publish_pipelined(address: NatsAddress, cluster: str, payload: bytes, count: int) -> float:
    """Return publishes a second of `publish_async` with 4,000 in flight."""

    async def work(client: Client) -> float:
        stream = client.jetstream(publish_async_max_pending=4000)
        subject = subjects.log(cluster, f"vm.{secrets.token_hex(4)}")
        began = time.perf_counter()
        futures = [await stream.publish_async(subject, payload, wait_stall=60) for _ in range(count)]
        await asyncio.gather(*futures)
        return count / (time.perf_counter() - began)

    return with_client(address, work)


async def _batch(client: Client, subject: str, payload: bytes, size: int, *, guarded: bool = False) -> None:
    """Publish one atomic batch by hand and await its acknowledgement.

    `guarded`: each message on a subject of its own, with an id and the expected sequence, as independent writers need.
    """
    name = secrets.token_hex(4)

    def message(place: int) -> tuple[str, dict[str, str]]:
        headers = {"Nats-Batch-Id": name, "Nats-Batch-Sequence": str(place)}
        if not guarded:
            return subject, headers
        own = f"{subject}-{name}-{place}"
        return own, {**headers, "Nats-Msg-Id": own, "Nats-Expected-Last-Subject-Sequence": "0"}

    for place in range(1, size):
        to, headers = message(place)
        await client.publish(to, payload, headers=headers)
    to, headers = message(size)
    headers["Nats-Batch-Commit"] = "1"
    answer = msgspec.json.decode((await client.request(to, payload, timeout=30, headers=headers)).data)
    if "error" in answer:
        raise RuntimeError(f"the baseline's batch was refused: {answer['error']}")


def publish_batches(
    address: NatsAddress, cluster: str, payload: bytes, count: int, size: int, *, guarded: bool = False
) -> float:
    """Return messages a second in atomic batches of `size`, one after the other; `guarded` as in `_batch`."""

    async def work(client: Client) -> float:
        subject = subjects.log(cluster, f"vm.{secrets.token_hex(4)}")
        batches = max(count // size, 1)
        began = time.perf_counter()
        for _ in range(batches):
            await _batch(client, subject, payload, size, guarded=guarded)
        return batches * size / (time.perf_counter() - began)

    return with_client(address, work)


def paced_lives(
    address: NatsAddress, cluster: str, payload: bytes, *, count: int, rate: int, publishes: int
) -> list[float]:
    """Return, for lives begun `rate` a second, the seconds until their durable writes were acknowledged.

    A life is one atomic batch of three (two slots and the request) and then `publishes` single ones, one after the
    other: the least that any log must store before a machine is started, or its agent is in.
    """

    async def work(client: Client) -> list[float]:
        stream = client.jetstream()

        async def life(at_s: float) -> float:
            await asyncio.sleep(max(at_s - time.monotonic(), 0))
            subject = subjects.log(cluster, f"vm.{secrets.token_hex(4)}")
            await _batch(client, subject, payload, 3)
            for _ in range(publishes):
                await stream.publish(subject, payload)
            return time.monotonic() - at_s

        begin = time.monotonic() + 0.1
        return await asyncio.gather(*(life(begin + number / rate) for number in range(count)))

    return with_client(address, work)


def _consumer(cluster: str) -> tuple[str, dict[str, Any]]:
    name = f"baseline-{secrets.token_hex(4)}"
    config = {
        "name": name,
        "ack_policy": "none",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 60 * 10**9,
    }
    return name, {"stream_name": subjects.stream(cluster), "config": config}


def _ask_bytes() -> bytes:
    return msgspec.json.encode({"batch": _ASKED, "expires": 30 * 10**9})


def read_with_nats_py(address: NatsAddress, cluster: str, count: int) -> float:
    """Return facts a second of the fastest loop over nats-py: a callback, asked for 10,000 at a time, decoded."""

    async def work(client: Client) -> float:
        name, body = _consumer(cluster)
        stream, inbox = subjects.stream(cluster), client.new_inbox()
        await client.request(f"{_API}.CONSUMER.CREATE.{stream}.{name}", msgspec.json.encode(body), timeout=5)
        decode = msgspec.json.Decoder(Form).decode
        done = asyncio.get_running_loop().create_future()
        seen, asked = 0, 0

        async def ask() -> None:
            nonlocal asked
            asked += _ASKED
            await client.publish(f"{_API}.CONSUMER.MSG.NEXT.{stream}.{name}", _ask_bytes(), reply=inbox)

        async def take(message: Msg) -> None:
            nonlocal seen
            if int(message.reply.split(".", 6)[5]) != seen + 1:
                done.set_exception(RuntimeError(f"the baseline missed what follows {seen}"))
            decode(message.data)
            seen += 1
            if seen == count:
                done.set_result(time.perf_counter())
            elif asked - seen == _ASKED // 2:
                await ask()

        await client.subscribe(inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
        began = time.perf_counter()
        await ask()
        ended: float = await asyncio.wait_for(done, 600)
        return count / (ended - began)

    return with_client(address, work)


def read_with_socket(address: NatsAddress, cluster: str, count: int) -> float:
    """Return facts a second of a loop over a plain socket that parses, counts sequences and decodes: no more."""
    name, body = _consumer(cluster)
    stream = subjects.stream(cluster)
    decode = msgspec.json.Decoder(Form).decode
    with Wire(address, name="baseline") as wire:
        call(wire, f"CONSUMER.CREATE.{stream}.{name}", body, 5)
        ask = publication(f"{_API}.CONSUMER.MSG.NEXT.{stream}.{name}", f"{wire.inbox}.p", _ask_bytes())
        raw = wire._socket
        raw.settimeout(30)
        seen, asked, buffer = 0, 0, b""
        began = time.perf_counter()
        while seen < count:
            if asked - seen <= _ASKED // 2:
                raw.sendall(ask)
                asked += _ASKED
            buffer += raw.recv(1 << 18)
            at = 0
            while (line := buffer.find(b"\r\n", at)) >= 0:
                if buffer.startswith(b"PING", at):
                    raw.sendall(b"PONG\r\n")
                    at = line + 2
                    continue
                parts = buffer[at:line].split(b" ")
                end = line + 2 + int(parts[-1])
                if end + 2 > len(buffer):
                    break
                if int(parts[3].split(b".", 6)[5]) != seen + 1:
                    raise RuntimeError(f"the baseline missed what follows {seen}")
                body_at = line + 2 + (int(parts[-2]) if parts[0] == b"HMSG" else 0)
                decode(buffer[body_at:end])
                seen += 1
                at = end + 2
            buffer = buffer[at:]
        return count / (time.perf_counter() - began)

"""When a receiver's handlers may take the time that its senders wait in."""

import asyncio
from collections.abc import Sequence

from receiver.batching import Batches


def test_it_is_not_quiet_while_a_sender_waits_for_a_slow_disk() -> None:
    async def scenario() -> None:
        may_end, began = asyncio.Event(), asyncio.Event()

        async def write(items: Sequence[int]) -> Sequence[int]:
            began.set()
            await may_end.wait()
            return items

        batches = Batches(write)
        sender = asyncio.create_task(batches.add(1))
        await began.wait()
        handlers = asyncio.create_task(
            batches.wait_until_quiet(for_seconds=0.001, within_seconds=60)
        )
        done, _ = await asyncio.wait([handlers], timeout=0.05)
        assert not done
        may_end.set()
        assert await sender == 1
        async with asyncio.timeout(10):
            await handlers

    asyncio.run(scenario())


def test_handlers_wait_for_a_slow_disk_no_longer_than_they_must() -> None:
    async def scenario() -> None:
        async def write(items: Sequence[int]) -> Sequence[int]:
            await asyncio.Event().wait()
            return items

        batches = Batches(write)
        sender = asyncio.create_task(batches.add(1))
        async with asyncio.timeout(10):
            await batches.wait_until_quiet(for_seconds=60, within_seconds=0.01)
        assert not sender.done()
        sender.cancel()

    asyncio.run(scenario())

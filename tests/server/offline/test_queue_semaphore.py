from __future__ import annotations

import asyncio
import random
import threading

from logitship.server.offline.queue_semaphore import QueueSemaphore
from tests.helpers.random_cases import random_seeds


@random_seeds(5)
def test_limit_and_fifo_order(seed: int) -> None:
    choice = random.Random(seed)
    sizes = [choice.randint(1, 5) for _ in range(60)]
    semaphore = QueueSemaphore(5)
    held = 0
    admitted: list[int] = []

    async def use(index: int) -> None:
        nonlocal held
        await semaphore.acquire(sizes[index])
        admitted.append(index)
        held += sizes[index]
        assert held <= 5
        for _ in range(choice.randint(0, 4)):
            await asyncio.sleep(0)
        held -= sizes[index]
        semaphore.release(sizes[index])

    async def main() -> None:
        await asyncio.gather(*(use(index) for index in range(len(sizes))))

    asyncio.run(main())
    assert admitted == list(range(len(sizes)))
    assert semaphore._free == 5


@random_seeds(5)
def test_cancelled_waiters_release_slots(seed: int) -> None:
    choice = random.Random(seed)
    semaphore = QueueSemaphore(4)

    async def use(size: int) -> None:
        await semaphore.acquire(size)
        try:
            await asyncio.sleep(0)
        finally:
            semaphore.release(size)

    async def main() -> None:
        tasks = [asyncio.create_task(use(choice.randint(1, 4))) for _ in range(60)]
        while not all(task.done() for task in tasks):
            choice.choice(tasks).cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert semaphore._free == 4
    assert not semaphore._waiters


async def test_slots_of_waiter_cancelled_on_admission() -> None:
    semaphore = QueueSemaphore(1)
    await semaphore.acquire(1)
    first, second = asyncio.create_task(semaphore.acquire(1)), asyncio.create_task(semaphore.acquire(1))
    await asyncio.sleep(0)
    semaphore.release(1)  # admits the first, which is cancelled before it runs
    first.cancel()
    await asyncio.wait_for(second, 10)
    assert first.cancelled()


async def test_withdrawn_waiter_has_no_slots() -> None:
    semaphore, owner = QueueSemaphore(2), object()
    await semaphore.acquire(1)
    tasks = [asyncio.create_task(semaphore.acquire(2, owner)), asyncio.create_task(semaphore.acquire(1))]
    cancelled = asyncio.create_task(semaphore.acquire(2, owner))
    await asyncio.sleep(0)
    semaphore.withdraw(owner)
    cancelled.cancel()
    assert await asyncio.wait_for(asyncio.gather(*tasks), 10) == [False, True]
    assert semaphore._free == 0
    assert not semaphore._waiters


def test_release_from_another_event_loop() -> None:
    semaphore = QueueSemaphore(1)
    acquired = threading.Event()
    waiting = threading.Event()

    async def other() -> None:
        task = asyncio.create_task(semaphore.acquire(1))
        await asyncio.sleep(0)
        waiting.set()
        await task
        acquired.set()
        semaphore.release(1)

    asyncio.run(semaphore.acquire(1))
    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    assert waiting.wait(10)
    assert not acquired.is_set()
    semaphore.release(1)
    thread.join(10)
    assert acquired.is_set()


def test_closed_event_loop_of_a_waiter() -> None:
    semaphore = QueueSemaphore(1)
    waiting = semaphore.acquire(1)

    async def start() -> None:
        waiting.send(None)  # runs it until it waits; as a task, it would be cancelled with the loop

    asyncio.run(semaphore.acquire(1))
    asyncio.run(start())
    semaphore.release(1)
    asyncio.run(asyncio.wait_for(semaphore.acquire(1), 10))
    waiting.close()

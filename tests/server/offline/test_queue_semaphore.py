from __future__ import annotations

import asyncio
import random
import threading

import pytest

from logitship.server.offline.queue_semaphore import QueueSemaphore


@pytest.mark.parametrize("seed", range(5))
def test_never_more_inside_than_places_and_everybody_enters_in_order(seed: int) -> None:
    choice = random.Random(seed)
    sizes = [choice.randint(1, 5) for _ in range(60)]
    room = QueueSemaphore(5)
    inside = 0
    entered: list[int] = []

    async def visit(visitor: int) -> None:
        nonlocal inside
        await room.enter(sizes[visitor])
        entered.append(visitor)
        inside += sizes[visitor]
        assert inside <= 5
        for _ in range(choice.randint(0, 4)):
            await asyncio.sleep(0)
        inside -= sizes[visitor]
        room.leave(sizes[visitor])

    async def main() -> None:
        await asyncio.gather(*(visit(visitor) for visitor in range(len(sizes))))

    asyncio.run(main())
    assert entered == list(range(len(sizes)))
    assert room._free == 5


@pytest.mark.parametrize("seed", range(5))
def test_who_gives_up_takes_no_places(seed: int) -> None:
    choice = random.Random(seed)
    room = QueueSemaphore(4)

    async def visit(size: int) -> None:
        await room.enter(size)
        try:
            await asyncio.sleep(0)
        finally:
            room.leave(size)

    async def main() -> None:
        tasks = [asyncio.create_task(visit(choice.randint(1, 4))) for _ in range(60)]
        while not all(task.done() for task in tasks):
            choice.choice(tasks).cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert room._free == 4
    assert not room._waiters


def test_places_that_come_while_their_taker_is_cancelled_go_to_the_next() -> None:
    async def main() -> None:
        room = QueueSemaphore(1)
        await room.enter(1)
        first, second = asyncio.create_task(room.enter(1)), asyncio.create_task(room.enter(1))
        await asyncio.sleep(0)
        room.leave(1)  # to the first, which is cancelled before it learns of it
        first.cancel()
        await asyncio.wait_for(second, 10)
        assert first.cancelled()

    asyncio.run(main())


def test_one_event_loop_makes_room_for_another() -> None:
    room = QueueSemaphore(1)
    entered = threading.Event()
    waiting = threading.Event()

    async def other() -> None:
        task = asyncio.create_task(room.enter(1))
        await asyncio.sleep(0)
        waiting.set()
        await task
        entered.set()
        room.leave(1)

    asyncio.run(room.enter(1))
    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    assert waiting.wait(10)
    assert not entered.is_set()
    room.leave(1)
    thread.join(10)
    assert entered.is_set()

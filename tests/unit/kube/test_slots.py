"""How rounds share the calls of a function."""

import asyncio

import pytest

from gradsharding.platforms.slots import Slots


class Line:
    """Holders of slots, served one by one: ``order`` is who got one, in time."""

    def __init__(self, limit):
        self.slots = Slots(limit)
        self.order = []
        self.tasks = {}
        self._ends = {}

    def join(self, name):
        """``name`` begins with its round's letter."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name))

    async def _hold(self, name):
        async with self.slots.take(name[0]):
            self.order.append(name)
            await self._ends[name].wait()

    async def leave(self, name):
        self._ends[name].set()
        await self.tasks[name]
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


def run(coroutine_function):
    asyncio.run(coroutine_function())


def test_at_most_so_many():
    async def scenario():
        line = Line(2)
        for name in ("a1", "a2", "a3"):
            line.join(name)
        await line.settle()
        assert line.order == ["a1", "a2"]
        assert line.slots.in_use == 2
        await line.leave("a2")
        assert line.order == ["a1", "a2", "a3"]
        await line.leave("a1")
        await line.leave("a3")
        assert line.slots.in_use == 0

    run(scenario)


def test_rounds_take_turns():
    async def scenario():
        line = Line(1)
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            line.join(name)
        await line.settle()
        for _ in range(7):
            await line.leave(line.order[-1])
        assert line.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    run(scenario)


def test_nobody_overtakes_who_waits():
    async def scenario():
        line = Line(1)
        line.join("a1")
        line.join("a2")
        await line.settle()
        line._ends["a1"].set()
        line.join("b1")  # comes in the moment in which the slot gets free
        await line.settle()
        assert line.order == ["a1", "a2"]
        await line.leave("a2")
        await line.leave("b1")
        assert line.slots.in_use == 0

    run(scenario)


def test_who_is_cancelled_while_waiting_is_passed_over():
    async def scenario():
        line = Line(1)
        for name in ("a1", "b1", "c1"):
            line.join(name)
        await line.settle()
        line.tasks["b1"].cancel()
        await line.settle()
        await line.leave("a1")
        assert line.order == ["a1", "c1"]
        await line.leave("c1")
        line.join("d1")
        await line.settle()
        assert line.order[-1] == "d1"
        await line.leave("d1")
        assert line.slots.in_use == 0

    run(scenario)


def test_who_is_cancelled_in_the_moment_of_being_served_passes_it_on():
    async def scenario():
        line = Line(1)
        leaving = asyncio.Event()

        async def first():
            async with line.slots.take("a"):
                await leaving.wait()
            line.tasks["b1"].cancel()  # b1's turn has come, and it does not know yet

        holder = asyncio.create_task(first())
        await line.settle()
        line.join("b1")
        line.join("c1")
        await line.settle()
        leaving.set()
        await holder
        await line.settle()
        assert line.order == ["c1"]
        await line.leave("c1")
        assert line.slots.in_use == 0

    run(scenario)


def test_who_fails_gives_its_slot_back():
    async def scenario():
        slots = Slots(1)
        with pytest.raises(KeyError):
            async with slots.take("a"):
                raise KeyError
        assert slots.in_use == 0
        async with slots.take("b"):
            assert slots.in_use == 1

    run(scenario)

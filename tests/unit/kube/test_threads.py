import asyncio
import threading

import pytest

from gradsharding.kube.threads import in_thread


def test_a_value_and_an_error():
    async def both():
        assert await in_thread(lambda: threading.current_thread().daemon) is True
        with pytest.raises(KeyError):
            await in_thread(lambda: {}["missing"])

    asyncio.run(both())


def test_many_do_not_queue():
    async def meet():
        barrier = threading.Barrier(50)
        await asyncio.gather(*(in_thread(lambda: barrier.wait(30)) for _ in range(50)))

    asyncio.run(meet())


def test_what_is_abandoned_goes_on_and_holds_up_nobody():
    release, ended = threading.Event(), threading.Event()

    def work():
        release.wait(30)
        ended.set()

    async def abandon():
        task = asyncio.ensure_future(in_thread(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(abandon())
    release.set()
    assert ended.wait(30)

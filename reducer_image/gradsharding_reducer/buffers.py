"""The large buffers of one invocation, from one mapping that goes back to the system whole."""

from __future__ import annotations

import mmap

import numpy as np

from gradsharding_reducer import kernel

_ALIGNMENT = 4096


class Buffers:
    """``slots`` of the ring, the ``accumulator`` of a block, the ``body`` of a part, and the kernel's ``scratch``.

    malloc would keep freed buffers of this size for later, so that a server's next, smaller shard would look as large
    as the last one. Pages that are never touched take no memory.
    """

    def __init__(self, slots: int, slot_bytes: int, elements: int, body_bytes: int) -> None:
        """Raises MemoryError when the cap does not hold them."""
        sizes = [slot_bytes] * slots + [elements * 8, body_bytes, kernel.SCRATCH_BYTES]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        try:
            # Private: a shared mapping would not count under RLIMIT_DATA, but as shared memory.
            mapping = mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise MemoryError(f"{starts[-1]} bytes of buffers") from None
        pieces = [np.frombuffer(mapping, np.uint8, size, start) for size, start in zip(sizes, starts[:-1], strict=True)]
        *filled, accumulator, body, scratch = pieces
        self.slots = [slot.data for slot in filled]
        self.accumulator: kernel.Doubles = accumulator.view(np.float64)
        self.body: kernel.Bytes = body
        self.scratch = kernel.Scratch(scratch)

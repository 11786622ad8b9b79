"""Blocks cover a part exactly, within their limits; reads cover a block exactly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gradsharding_reducer.blocks import ExtentIndex, blocks
from gradsharding_reducer.task import DTYPES, Extent, Run

runs_of = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 50)), min_size=1, max_size=12)


def layout(tensors):
    runs, at = [], 0
    for dtype, count in tensors:
        runs.append(Run(dtype, at, at + count * DTYPES[dtype]))
        at = runs[-1].end
    return runs


@settings(deadline=None)
@given(runs_of, st.integers(32, 200), st.data())
def test_blocks_cover_the_part_in_order_within_their_limits(tensors, range_bytes, data):
    runs = layout(tensors)
    borders = sorted({b for run in runs for b in range(run.start, run.end + 1, DTYPES[run.dtype])})
    start, end = sorted((data.draw(st.sampled_from(borders)), data.draw(st.sampled_from(borders))))
    at = start
    for block in blocks(runs, start, end, range_bytes):
        assert block.start == at
        assert 0 < block.end - block.start <= range_bytes
        elements = 0
        for segment in block.segments:
            assert segment.element == elements
            assert block.start + segment.offset == at
            run = next(r for r in runs if r.start <= at < r.end)
            assert segment.dtype == run.dtype
            assert (at - run.start) % DTYPES[run.dtype] == 0
            at += segment.elements * DTYPES[run.dtype]
            elements += segment.elements
        assert at == block.end
        assert 0 < elements <= range_bytes // 4
    assert at == end


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.randoms(use_true_random=False), st.data())
def test_reads_gather_any_range_from_shuffled_extents(lengths, random, data):
    canonical = bytes(range(256))[: sum(lengths)]
    order = list(range(len(lengths)))
    random.shuffle(order)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    objects, extents = [b"", b""], [None] * len(lengths)
    for i in order:
        which = random.randrange(2)
        extents[i] = Extent(starts[i], lengths[i], which, len(objects[which]))
        objects[which] += canonical[starts[i] : starts[i] + lengths[i]]
    start = data.draw(st.integers(0, len(canonical)))
    end = data.draw(st.integers(start, len(canonical)))
    slot = bytearray(end - start)
    reads = ExtentIndex(extents).reads(start, end)
    for read in reads:
        slot[read.at : read.at + read.length] = objects[read.object][read.offset : read.offset + read.length]
    assert bytes(slot) == canonical[start:end]
    assert sum(read.length for read in reads) == end - start


def test_neighbouring_extents_of_one_object_are_one_read():
    extents = [Extent(0, 8, 0, 100), Extent(8, 0, 0, 7), Extent(8, 8, 0, 108), Extent(16, 8, 0, 50)]
    reads = ExtentIndex(extents).reads(2, 20)
    assert [(read.offset, read.length, read.at) for read in reads] == [(102, 14, 0), (50, 4, 14)]

"""Which layout a round takes, and where each client's bytes are in it."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsharding.errors import UpdateError
from gradsharding.formats import TensorEntry, UpdateHeader
from gradsharding.rounds.layout import (
    METADATA_BYTES,
    Tensor,
    TensorLayout,
    canonical_layout,
    extents,
    merge_metadata,
)
from gradsharding_reducer.task import DTYPES, ContractError, Extent, Run

A = ("a", "F32", (2,))
B = ("b", "F32", (3, 1))
C = ("c", "BF16", (5,))
EMPTY = ("e", "I64", (0, 4))


def header(*kinds, start=100, metadata=None):
    layout = TensorLayout.of(kinds)
    return UpdateHeader(start, tuple(TensorEntry(*tensor) for tensor in layout.tensors), metadata or {})


def test_offsets_runs_and_size():
    layout = TensorLayout.of([A, EMPTY, B, C, A])
    assert layout.tensors == (
        Tensor("a", "F32", (2,), 0, 8),
        Tensor("e", "I64", (0, 4), 8, 8),
        Tensor("b", "F32", (3, 1), 8, 20),
        Tensor("c", "BF16", (5,), 20, 30),
        Tensor("a", "F32", (2,), 30, 38),
    )
    assert layout.size == 38
    assert layout.runs == (Run("F32", 0, 20), Run("BF16", 20, 30), Run("F32", 30, 38))


@pytest.mark.parametrize("kinds", [[], [EMPTY], [EMPTY, ("f", "F16", (0,))]])
def test_a_model_of_no_bytes_is_legal(kinds):
    layout = canonical_layout({"k": header(*kinds)})
    assert len(layout.tensors) == len(kinds)
    assert (layout.size, layout.runs) == (0, ())
    assert extents(layout, header(*kinds)) == ()
    with pytest.raises(ValueError, match="outside"):
        layout.tensor_at(0)


def test_tensor_at_every_byte():
    layout = TensorLayout.of([EMPTY, A, ("e2", "F64", (0,)), B, C, ("e3", "F64", (0,))])
    names = [layout.tensor_at(offset).name for offset in range(layout.size)]
    assert names == ["a"] * 8 + ["b"] * 12 + ["c"] * 10
    for offset in (-1, layout.size):
        with pytest.raises(ValueError, match="outside of the data section of 30 bytes"):
            layout.tensor_at(offset)


def test_the_plan_keeps_a_layout():
    layout = TensorLayout.of([A, EMPTY, ("имя", "BOOL", ())])
    document = json.loads(json.dumps(layout.to_json()))
    assert document == [["a", "F32", [2]], ["e", "I64", [0, 4]], ["имя", "BOOL", []]]
    assert TensorLayout.from_json(document) == layout
    assert TensorLayout.from_json([]) == TensorLayout(())


@pytest.mark.parametrize(
    "document",
    [None, {}, "x", [None], [["a", "F32"]], [["a", "F4", [1]]], [[1, "F32", [1]]], [["a", "F32", 1]], [["a", [], [1]]],
     [["a", "F32", [-1]]], [["a", "F32", [True]]], [["a", "F32", ["1"]]], [["a", "F32", [2**62]]]],
)  # fmt: skip
def test_other_documents_are_no_layout(document):
    with pytest.raises(ContractError, match="a layout"):
        TensorLayout.from_json(document)


def winner(*updates):
    return [
        tensor.name for tensor in canonical_layout({f"k{i}": header(*kinds) for i, kinds in enumerate(updates)}).tensors
    ]


def test_the_majority_decides():
    assert winner([A], [A, B], [A, B]) == ["a", "b"]
    assert winner([A, B], [B, A], [B, A]) == ["b", "a"]
    # The set is voted on before the order: three clients agree on {a, b}, though two on [c] alone.
    assert winner([C], [C], [A, B], [B, A], [A, B]) == ["a", "b"]


def test_a_tie_goes_to_the_first_key():
    assert winner([B], [A]) == ["b"]
    assert winner([A], [B]) == ["a"]
    assert winner([B, A], [A, B]) == ["b", "a"]
    assert winner([C], [B, A], [A, B], [C]) == ["c"]
    assert winner([A, B], [C], [C], [B, A]) == ["a", "b"]


def test_shape_and_dtype_are_part_of_the_vote():
    other_shape, other_dtype = ("a", "F32", (2, 1)), ("a", "I32", (2,))
    for kind in (other_shape, other_dtype):
        assert canonical_layout({"1": header(A), "2": header(kind), "3": header(kind)}).tensors[0][:3] == kind


@pytest.mark.parametrize("keys", [("Z", "a"), ("a", "é"), ("z", "\uffff"), ("\uffff", "\U0001f600")])
def test_keys_are_ordered_by_their_bytes(keys):
    assert sorted(keys, key=str.encode) == list(keys)
    for order in (keys, keys[::-1]):
        headers = {key: header(A if key == keys[0] else B) for key in order}
        assert canonical_layout(headers).tensors[0].name == "a"


def test_votes_count_clients_not_headers():
    """Headers may share their tensors."""
    shared = header(B)
    headers = {"1": header(A), "2": shared, "3": UpdateHeader(7, shared.tensors, {})}
    assert canonical_layout(headers).tensors[0].name == "b"


def test_one_order_is_one_extent():
    layout = TensorLayout.of([A, EMPTY, B, C])
    assert extents(layout, header(A, EMPTY, B, C, start=77)) == (Extent(0, 30, 0, 77),)
    assert extents(layout, header(EMPTY, A, B, C, start=77)) == (Extent(0, 30, 0, 77),)


def test_another_order_is_as_few_extents_as_can_be():
    layout = TensorLayout.of([A, B, C])
    assert extents(layout, header(C, A, B)) == (Extent(0, 20, 0, 110), Extent(20, 10, 0, 100))
    assert extents(layout, header(C, B, A)) == (Extent(0, 8, 0, 122), Extent(8, 12, 0, 110), Extent(20, 10, 0, 100))


KINDS = st.lists(
    st.tuples(st.text(max_size=3), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    unique_by=lambda kind: kind[0],
    max_size=8,
)


@settings(deadline=None)
@given(KINDS, st.randoms(use_true_random=False), st.integers(8, 500))
def test_extents_put_every_byte_in_its_place(kinds, random, start):
    layout = TensorLayout.of(kinds)
    shuffled = random.sample(kinds, len(kinds))
    update = header(*shuffled, start=start)
    parts = extents(layout, update)
    places = {tensor.name: tensor for tensor in update.tensors}
    expected = [
        start + places[tensor.name].start + byte
        for tensor in layout.tensors
        for byte in range(tensor.end - tensor.start)
    ]
    assert [extent.offset + byte for extent in parts for byte in range(extent.length)] == expected
    assert [extent.start for extent in parts] == [sum(e.length for e in parts[:i]) for i in range(len(parts))]
    assert all(extent.object == 0 and extent.length > 0 for extent in parts)
    assert all(a.offset + a.length != b.offset for a, b in pairwise(parts))


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ([A], "tensor 'b' is missing"),
        ([A, B, C], "tensor 'c' is not in most updates"),
        ([A, ("b", "F32", (3,))], "tensor 'b' has shape [3], but [3, 1] in most updates"),
        ([("a", "I32", (2,)), B], "tensor 'a' is I32, but F32 in most updates"),
        ([("a\n", "F32", (2,)), B], r"tensor 'a' is missing, tensor 'a\n' is not in most updates"),
        (
            [C, EMPTY],
            "tensor 'a' is missing, tensor 'b' is missing, tensor 'c' is not in most updates, and 1 more difference",
        ),
        (
            [C, EMPTY, ("f", "I8", ())],
            "tensor 'a' is missing, tensor 'b' is missing, tensor 'c' is not in most updates, and 2 more differences",
        ),
    ],
)
def test_what_does_not_fit_is_named(kinds, reason):
    with pytest.raises(UpdateError) as error:
        extents(TensorLayout.of([A, B]), header(*kinds))
    assert str(error.value) == reason


def test_reasons_stay_short():
    wide = ("x" * 10_000, "F32", (1,) * 64)
    with pytest.raises(UpdateError) as error:
        extents(TensorLayout.of([(*wide[:2], (2,))]), header(wide))
    assert len(str(error.value)) < 250


def merged(*clients):
    return merge_metadata(header(metadata=metadata) for metadata in clients)


def test_metadata_that_all_share_is_passed_on():
    assert merged() == {}
    assert merged({"format": "pt", "b": "1"}) == {"format": "pt", "b": "1"}
    assert merged({"format": "pt", "b": "1"}, {"format": "pt", "b": "2"}, {"c": "", "format": "pt"}) == {"format": "pt"}
    assert merged({"format": "pt"}, {}) == {}


def test_our_keys_and_the_number_of_examples_are_not():
    metadata = {"gradsharding.plan": "x", "num_examples": "5", "gradsharding": "kept"}
    assert merged(metadata, metadata) == {"gradsharding": "kept"}


def test_metadata_is_limited_to_what_fits_in_key_order():
    big = {"b": "x" * (METADATA_BYTES - 200), "a": "first", "c": "y" * 300, "d": "last"}
    assert merged(big, big).keys() == {"a", "b", "d"}
    assert merged({"a": "\0" * (METADATA_BYTES // 6), "z": ""}) == {"z": ""}  # six bytes each as JSON

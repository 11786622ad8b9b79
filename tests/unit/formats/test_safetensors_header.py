"""Headers of .safetensors: what is read, and what each lie is called."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from update_files import safetensors_file, tensors_of, update, with_header

from gradsharding.errors import UpdateError
from gradsharding.formats import TensorEntry, header_reader
from gradsharding.formats import safetensors as reader

LIMIT = 16 * 1024**2


def parse(file):
    length = reader.header_length(file[:65536], len(file), LIMIT)
    return reader.parse(file[:length], len(file))


def test_golden_bytes():
    file = (
        b"\xd0\x00\x00\x00\x00\x00\x00\x00"
        b'{"__metadata__":{"num_examples":"12"},'
        b'"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]},'
        b'"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
        b'"c":{"dtype":"I8","shape":[0],"data_offsets":[14,14]}}      '
        b"\x00\x00\x80\x3f\x00\x00\x00\x40\x80\x3f\x00\x40\x40\x40"
    )
    header = parse(file)
    assert header.data_start == 8 + 208
    assert header.tensors == (
        TensorEntry("a", "F32", (2, 1), 0, 8),
        TensorEntry("b", "BF16", (3,), 8, 14),
        TensorEntry("c", "I8", (0,), 14, 14),
    )
    assert header.metadata == {"num_examples": "12"}


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "ключ": "значение"}])
def test_files_of_the_safetensors_library(metadata):
    arrays = {
        "layer.weight": np.arange(12, dtype="f4").reshape(3, 4),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 7), "f2"),
        "flags": np.array([True, False, True]),
        "counts": np.arange(5, dtype="u2"),
        "bytes": np.arange(3, dtype="i1"),
        "имя\n\0": np.arange(2, dtype="i8"),
    }
    file = safetensors.numpy.save(arrays, metadata)
    header = parse(file)
    assert {tensor.name for tensor in header.tensors} == arrays.keys()
    for name, _, shape, start, end in header.tensors:
        data = file[header.data_start + start : header.data_start + end]
        assert shape == arrays[name].shape
        assert data == arrays[name].tobytes()
    assert header.metadata == (metadata or {})


def test_all_dtypes_of_the_library_are_told_apart():
    arrays = {str(dtype): np.ones(2, dtype) for dtype in np.typecodes["AllInteger"][:8] + "efd?"}
    dtypes = {tensor.dtype for tensor in parse(safetensors.numpy.save(arrays)).tensors}
    assert dtypes == {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}


@pytest.mark.parametrize("file", [with_header("{}"), with_header("{}   "), update(metadata={"a": "b"})])
def test_a_model_of_nothing_is_legal(file):
    assert parse(file).tensors == ()


def test_order_in_the_json_does_not_matter():
    document, length = tensors_of(a=("F32", 4, [2]), empty2=("F32", 4, [0]), empty1=("F32", 4, [0]), b=("I8", 1, []))
    backwards = dict(reversed(document.items()))
    one, other = (parse(safetensors_file(d, bytes(length))) for d in (document, backwards))
    assert one.tensors == other.tensors
    assert [tensor.name for tensor in one.tensors] == ["a", "empty1", "empty2", "b"]


def of(*members, size=0):
    """A file of these members of the JSON object and that many bytes of data."""
    return with_header("{" + ",".join(members) + "}", bytes(size))


X = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
Y = '"y":{"dtype":"I8","shape":[1],"data_offsets":[%d,%d]}'
LIES = [
    (b"\x02\0\0\0\0\0\0", "has 7 bytes, too few for a safetensors header"),
    (b"\x03\0\0\0\0\0\0\0{}", "11 bytes long, but the object has 10: it is truncated"),
    (with_header("[]"), "not a JSON object"),
    (with_header(" {}"), "not a JSON object"),
    (with_header(b'{"\xff":1}'), "not UTF-8"),
    (with_header('{"x":'), "header is not JSON: Expecting"),
    (with_header("{}{}"), "header is not JSON: Extra data"),
    (with_header('{"\n":1}'), "header is not JSON: Invalid control"),
    (with_header('{"x":NaN}'), "NaN is no number"),
    (with_header('{"x":-Infinity}'), "-Infinity is no number"),
    (with_header('{"x":' + "[" * 100_000), "nested too deeply"),
    (with_header('{"x":' * 100_000), "nested too deeply"),
    (with_header('{"x":' + "9" * 5000 + "}"), "too many digits"),
    (of(X, X, size=4), "names 'x' twice"),
    (of(X.replace("{", '{"shape":[1],'), size=4), "names 'shape' twice"),
    (of('"__metadata__":{}', '"__metadata__":{}'), "names '__metadata__' twice"),
    (of('"__metadata__":{"a":"","a":""}'), "names 'a' twice"),
    (of(X.replace("x", "\\ud800"), size=4), "half of a surrogate pair"),
    (of('"__metadata__":{"a":"\\udfff"}'), "half of a surrogate pair"),
    (of('"__metadata__":{"a":1}'), "__metadata__ is not a JSON object of strings"),
    (of('"__metadata__":[]'), "__metadata__ is not a JSON object of strings"),
    (of('"__metadata__":null'), "__metadata__ is not a JSON object of strings"),
    (of('"x":[]'), "tensor 'x' is not an object of exactly dtype, shape and data_offsets"),
    (of(X.replace("{", '{"more":1,'), size=4), "exactly dtype, shape and data_offsets"),
    (of('"x":{"dtype":"F32","shape":[1]}', size=4), "exactly dtype, shape and data_offsets"),
    (of(X, Y % (5, 6), size=6), "a gap before tensor 'y': it starts at 5, not 4"),
    (of(Y % (1, 2), size=2), "a gap before tensor 'y': it starts at 1, not 0"),
    (of(X, Y % (3, 4), size=4), "an overlap before tensor 'y': it starts at 3, not 4"),
    (of(X, X.replace("x", "y"), size=4), "an overlap before tensor 'y': it starts at 0, not 4"),
    (of(X, size=3), "truncated: its tensors need 4 bytes of data, it holds 3"),
    (of(X, size=6), "2 bytes follow"),
    (of(size=1), "1 bytes follow"),
]


@pytest.mark.parametrize(("file", "reason"), LIES)
def test_lies(file, reason):
    with pytest.raises(UpdateError) as error:
        parse(file)
    assert reason in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": 4}, "dtype of tensor 'x' is not a string"),
        ({"dtype": ["F32"]}, "dtype of tensor 'x' is not a string"),
        ({"shape": 1}, "shape of tensor 'x' is not a list"),
        ({"shape": [True]}, "shape of tensor 'x' is not a list of integers"),
        ({"shape": [1.0]}, "shape of tensor 'x' is not a list of integers"),
        ({"shape": [-1]}, "shape of tensor 'x' is not a list of integers"),
        ({"shape": [2**63]}, "shape of tensor 'x' is not a list of integers"),
        ({"shape": [0, 2**64]}, "shape of tensor 'x' is not a list of integers"),
        ({"shape": [1] * 65}, "65 dimensions"),
        ({"shape": [2**62, 2**62]}, "beyond any size"),
        ({"shape": [2**61]}, "beyond any size"),
        ({"shape": [2]}, "do not fit its shape and dtype, which take 8 bytes"),
        ({"shape": [0]}, "do not fit its shape and dtype, which take 0 bytes"),
        ({"dtype": "F64"}, "do not fit its shape and dtype"),
        ({"data_offsets": [0]}, "are not two integers"),
        ({"data_offsets": [0, 4, 4]}, "are not two integers"),
        ({"data_offsets": [0, 4.0]}, "are not two integers"),
        ({"data_offsets": [False, 4]}, "are not two integers"),
        ({"data_offsets": {"0": 4}}, "are not two integers"),
        ({"data_offsets": [-4, 0]}, "do not fit"),
        ({"data_offsets": [4, 0]}, "do not fit"),
        ({"data_offsets": [10**100, 10**100 + 4]}, "a gap before"),
    ],
)
def test_one_wrong_field(changed, reason):
    fields = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    assert parse(safetensors_file({"x": fields}, bytes(4))).tensors
    with pytest.raises(UpdateError, match=reason):
        parse(safetensors_file({"x": {**fields, **changed}}, bytes(4)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "C64", "f32"])
def test_unsupported_dtypes_are_named(dtype):
    with pytest.raises(UpdateError) as error:
        parse(safetensors_file({"x": {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}}, bytes(1)))
    assert str(error.value) == f"unsupported dtype {dtype} of tensor 'x'"


def test_names_and_dtypes_are_escaped_and_cut():
    with pytest.raises(UpdateError) as error:
        parse(safetensors_file({"\x1b[2J" + "x" * 10_000: {"dtype": "\r" * 999, "shape": [], "data_offsets": [0, 0]}}))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_a_header_over_the_limit_is_refused_before_it_is_read():
    first = (LIMIT - 7).to_bytes(8, "little")
    with pytest.raises(UpdateError, match=f"header of {LIMIT + 1} bytes is over the limit of {LIMIT}"):
        reader.header_length(first, 2**40, LIMIT)
    assert reader.header_length((LIMIT - 8).to_bytes(8, "little"), 2**40, LIMIT) == LIMIT
    with pytest.raises(UpdateError, match="truncated"):
        reader.header_length(b"\xff" * 8, 2**40, LIMIT)


def test_too_little_of_a_header_is_refused():
    file = update(w=("F32", 4, [2]))
    with pytest.raises(UpdateError, match="ends after 20"):
        reader.parse(file[:20], len(file))


def test_the_suffix_says_which_parser():
    assert header_reader("a/b.safetensors") is reader
    assert header_reader("a/b.npy").__name__ == "gradsharding.formats.npy"
    assert [header_reader(key) for key in ("a", "a/", "a.pt", "a.safetensors.json", "a.npz", "")] == [None] * 6


def check_any(file):
    """Never anything but an UpdateError or a header that the library would read too."""
    reason = ""
    try:
        header = parse(file)
    except UpdateError as error:
        reason = str(error)
    else:
        assert header.data_start + max((t.end for t in header.tensors), default=0) == len(file)
        assert {name for name, _ in safetensors.deserialize(file)} == {tensor.name for tensor in header.tensors}
    assert reason.isprintable()


SOUND, SOUND_BYTES = tensors_of(a=("F32", 4, [2, 2]), b=("BOOL", 1, [3]), c=("BF16", 2, []))
SOUND_FILE = safetensors_file({"__metadata__": {"k": "v"}, **SOUND}, bytes(SOUND_BYTES))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "F8_E4M3", 4, 16]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_bytes(raw):
    check_any(raw)
    check_any(with_header(raw))
    check_any(with_header(b"{" + raw + b"}"))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["__metadata__", "a", "b"]), JSON, max_size=3), st.binary(max_size=8))
def test_fuzz_documents(document, data):
    check_any(with_header(json.dumps(document), data))


@settings(deadline=None)
@given(
    st.sampled_from(["a", "b", "c"]),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "y"]), JSON, max_size=2),
)
def test_fuzz_fields(name, changed):
    check_any(with_header(json.dumps({**SOUND, name: {**SOUND[name], **changed}}), bytes(SOUND_BYTES)))


@settings(deadline=None)
@given(st.integers(0, len(SOUND_FILE) - 1), st.integers(0, 255), st.integers(0, len(SOUND_FILE)))
def test_fuzz_one_byte_and_the_end(position, byte, end):
    check_any(SOUND_FILE[:position] + bytes([byte]) + SOUND_FILE[position + 1 :])
    check_any(SOUND_FILE[:end])
    check_any(SOUND_FILE + SOUND_FILE[end:])

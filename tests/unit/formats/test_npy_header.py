"""Headers of .npy: what np.save writes is read, the rest is refused by name."""

import io

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as numpy_format

from gradsharding.errors import UpdateError
from gradsharding.formats import TensorEntry
from gradsharding.formats import npy as reader

LIMIT = 16 * 1024**2


def parse(file):
    length = reader.header_length(file[:65536], len(file), LIMIT)
    return reader.parse(file[:length], len(file))


def saved(array, version=None):
    file = io.BytesIO()
    numpy_format.write_array(file, np.asarray(array), version)
    return file.getvalue()


def with_literal(literal, data=b"", version=1):
    width = 2 if version == 1 else 4
    raw = literal.encode("utf-8") if isinstance(literal, str) else literal
    return b"\x93NUMPY" + bytes([version, 0]) + len(raw).to_bytes(width, "little") + raw + data


def test_golden_bytes():
    file = (
        b"\x93NUMPY\x01\x00\x38\x00"
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\n"
        b"\x00\x00\x80\x3f\x00\x00\x00\x40"
    )
    header = parse(file)
    assert header.data_start == 66
    assert header.tensors == (TensorEntry("array", "F32", (2,), 0, 8),)
    assert header.metadata == {}


@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        ("f8", "F64"), ("f4", "F32"), ("f2", "F16"), ("i8", "I64"), ("i4", "I32"), ("i2", "I16"), ("i1", "I8"),
        ("u8", "U64"), ("u4", "U32"), ("u2", "U16"), ("u1", "U8"), ("?", "BOOL"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_of_np_save(dtype, ours, version):
    for shape in [(), (0,), (3,), (2, 3), (1,) * 32]:
        array = np.ones(shape, dtype)
        file = saved(array, version)
        header = parse(file)
        assert header.tensors == (TensorEntry("array", ours, shape, 0, array.nbytes),)
        assert file[header.data_start :] == array.tobytes()


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ones(2, ">f4"), "unsupported dtype >f4 of tensor 'array'"),
        (np.ones(2, "c8"), "unsupported dtype <c8 of tensor 'array'"),
        (np.array(["a"]), "unsupported dtype <U1 of tensor 'array'"),
        (np.array([b"a"]), "unsupported dtype |S1 of tensor 'array'"),
        (np.array([None]), "unsupported dtype |O of tensor 'array'"),
        (np.zeros(2, "f4,i4"), "unsupported dtype structured of tensor 'array'"),
        (np.ones(2, "M8[s]"), "unsupported dtype '<M8[s]' of tensor 'array'"),
        (np.ones((2, 3), order="F"), "it is in Fortran order: save np.ascontiguousarray(array) instead"),
    ],
)
def test_other_arrays_of_np_save_are_refused(array, reason):
    file = io.BytesIO()
    np.save(file, array)
    with pytest.raises(UpdateError) as error:
        parse(file.getvalue())
    assert str(error.value) == reason


@pytest.mark.filterwarnings("ignore:Custom dtypes are saved as python objects")
def test_bfloat16_loses_its_type_in_npy():
    file = saved(np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(UpdateError, match=r"unsupported dtype .* of tensor 'array'"):
        parse(file)


def literal(descr="'<f4'", order="False", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"


@pytest.mark.parametrize(
    "text",
    [
        literal(),
        literal() + " " * 20 + "\n",
        literal().replace("}", ", }"),
        literal().replace("'", '"').replace(" ", ""),
        "{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}",
        literal(shape="(1, 2)"),
        literal(shape="(2, 1, )"),
    ],
)
def test_other_spellings(text):
    assert parse(with_literal(text, bytes(8))).tensors[0].end == 8


BAD_SHAPE = "shape of its header is not a tuple"
NOT_EXACTLY = "not a dictionary of exactly"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NOT_EXACTLY),
        ("{}", NOT_EXACTLY),
        ("{" * 5000, NOT_EXACTLY),
        ("[" + literal()[1:], NOT_EXACTLY),
        (literal() + "}", NOT_EXACTLY),
        (literal()[:-1], NOT_EXACTLY),
        (literal().replace("}", ", 'more': True}"), NOT_EXACTLY),
        (literal().replace("}", ",,}"), NOT_EXACTLY),
        (literal(shape="[2]"), NOT_EXACTLY),
        (literal(shape="2"), NOT_EXACTLY),
        (literal(shape="((2,),)"), NOT_EXACTLY),
        (literal(order="0"), NOT_EXACTLY),
        (literal(order="__import__('os')"), NOT_EXACTLY),
        (literal().replace("'shape': (2,)", "'descr': '<f4'"), "names descr twice"),
        (literal().replace("}", ", 'shape': (2,)}"), "names shape twice"),
        (literal(descr="True"), "descr of its header is not a string"),
        (literal(descr="(2,)"), "descr of its header is not a string"),
        (literal(descr="('<f4', (2,))"), "unsupported dtype structured"),
        (literal(descr="[('a', '<f4')]"), "unsupported dtype structured"),
        (literal(order="'False'"), "neither True nor False"),
        (literal(shape="'2'"), BAD_SHAPE),
        (literal(shape="(2)"), BAD_SHAPE),
        (literal(shape="(,)"), BAD_SHAPE),
        (literal(shape="(2,,)"), BAD_SHAPE),
        (literal(shape="(-2,)"), BAD_SHAPE),
        (literal(shape="(True,)"), BAD_SHAPE),
        (literal(shape="(2.0,)"), BAD_SHAPE),
        (literal(shape="(2L,)"), BAD_SHAPE),
        (literal(shape="(02,)"), BAD_SHAPE),
        (literal(shape="(٢,)"), BAD_SHAPE),
        (literal(shape=f"({'9' * 5000},)"), BAD_SHAPE),
        (literal(shape="(9223372036854775808,)"), "not a list of integers"),
        (literal(shape="(9223372036854775807, 2)"), "beyond any size"),
        (literal(shape=f"({'1, ' * 65})"), "65 dimensions"),
        (literal(shape="(3,)"), "truncated: its tensors need 12 bytes of data, it holds 8"),
        (literal(shape="(1,)"), "4 bytes follow"),
        (literal(shape="()"), "4 bytes follow"),
        (literal(shape="(0,)"), "8 bytes follow"),
    ],
)
def test_lies(text, reason):
    for version in (1, 2, 3):
        with pytest.raises(UpdateError) as error:
            parse(with_literal(text, bytes(8), version))
        assert reason in str(error.value)
        assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "does not begin as an .npy file does"),
        (b"\x93NUMPY\x01", "does not begin"),
        (b"PK\x03\x04" + bytes(100), "does not begin"),
        (b"\x93NUMPY\x04\x00" + bytes(100), "version 4.0"),
        (b"\x93NUMPY\x01\x01" + bytes(100), "version 1.1"),
        (b"\x93NUMPY\x01\x00\x01", "too few"),
        (b"\x93NUMPY\x02\x00\x01\x00\x00", "too few"),
        (b"\x93NUMPY\x01\x00\x01\x00", "truncated"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "truncated"),
        (with_literal(literal() + " " * 10_000, bytes(8)), "over the limit of 10010"),
    ],
)
def test_bad_beginnings(file, reason):
    with pytest.raises(UpdateError, match=reason):
        parse(file)


def test_the_callers_limit_holds_too():
    with pytest.raises(UpdateError, match="over the limit of 32"):
        reader.header_length(with_literal(literal()), 1000, 32)


def check_any(file):
    reason = ""
    try:
        header = parse(file)
    except UpdateError as error:
        reason = str(error)
    else:
        assert header.data_start + header.tensors[0].end == len(file)
    assert reason.isprintable()


SOUND = saved(np.ones((2, 3), "<f4"))


@settings(deadline=None)
@given(st.binary(max_size=100), st.sampled_from([1, 2, 3]))
def test_fuzz_bytes(raw, version):
    check_any(raw)
    check_any(with_literal(raw, b"", version))


@settings(deadline=None)
@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255), st.integers(0, len(SOUND)))
def test_fuzz_one_byte_and_the_end(position, byte, end):
    check_any(SOUND[:position] + bytes([byte]) + SOUND[position + 1 :])
    check_any(SOUND[:end])


PIECES = [
    "{",
    "}",
    "'descr'",
    "'shape'",
    "'fortran_order'",
    ":",
    ",",
    "(",
    ")",
    "'<f4'",
    "True",
    "False",
    "2",
    " ",
    "[",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20), st.integers(0, 8))
def test_fuzz_tokens(tokens, size):
    check_any(with_literal("{" + "".join(tokens), bytes(size)))

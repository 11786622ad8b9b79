"""Bytes of updates, written by hand so that they can also lie."""

import json


def with_header(text, data=b""):
    """A ``.safetensors`` whose header is exactly this text."""
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + data


def safetensors_file(document, data=b""):
    """A ``.safetensors`` with this JSON header."""
    return with_header(json.dumps(document), data)


def tensors_of(**tensors):
    """A JSON header of tensors given as ``name=(dtype, width, shape)``, laid out in this order, and its data length."""
    document = {}
    end = 0
    for name, (dtype, width, shape) in tensors.items():
        length = width
        for dimension in shape:
            length *= dimension
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    return document, end


def update(*, metadata=None, **tensors):
    """A sound ``.safetensors`` of zeros: ``update(metadata={…}, w=("F32", 4, [2, 3]))``."""
    document, length = tensors_of(**tensors)
    if metadata is not None:
        document = {"__metadata__": metadata, **document}
    return safetensors_file(document, bytes(length))

"""The numbers of released implementations, where they are on this machine."""

import json

import pytest
from safetensors.torch import load_file

from support.fixtures import SHARED


def fixture(name):
    """(description, tensors) of `name`, which may have a folder; the test is skipped without them."""
    path = SHARED / "parity" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}; set SFUMATO_SHARED to the folder of the reference values")
    described, tensors = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    for key, expected in described["tensors"].items():
        assert list(tensors[key].shape) == expected["shape"], key
    return described, tensors

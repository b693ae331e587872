"""The numbers of released code for post-hoc uncertainty; shapes and hyper-parameters come from the fixtures."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SHARED = Path(os.environ.get("SFUMATO_SHARED", Path(__file__).resolve().parents[3].parent / "shared"))


def fixture(name):
    """(description, tensors); the test is skipped without them."""
    folder = SHARED / "parity" / "posthoc"
    if not (folder / f"{name}.json").is_file():
        pytest.skip(f"no {name} in {folder}; set SFUMATO_SHARED to the folder of the reference values")
    described = json.loads((folder / f"{name}.json").read_text())
    tensors = load_file(folder / f"{name}.safetensors")
    for key, expected in described["tensors"].items():
        assert list(tensors[key].shape) == expected["shape"], key
    return described, tensors


def close(found, wanted, rtol=1e-10, atol=0.0):
    """Also in units of the largest value: a sum has the rounding of its terms, which may cancel."""
    single = torch.float32 in (found.dtype, wanted.dtype)
    atol = max(atol, (1e-6 if single else 1e-14) * float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, check_dtype=False)

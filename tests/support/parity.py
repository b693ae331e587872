"""The numbers of released implementations, where they are on this machine."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from support.fixtures import SHARED


def released_log_inclusion(x, y, eps):
    """(n, d) the expression of ProLIP's released code in place of log_inclusion, for exponents that do not overflow."""
    v = x.var + 2 * y.var
    distance = (x.mean - y.mean).square() / v
    return -1.5 * x.log_var - 0.5 * y.log_var - (v.log() + eps - math.log(2)) / 2 - math.exp(eps) * distance


def released_inclusion_test(x, y, eps):
    """(n, d) the same of inclusion_test."""
    return released_log_inclusion(x, y, eps) - released_log_inclusion(y, x, eps)


def released_inclusion_loss(x, y, scale, eps):
    """() the same of the mean of inclusion_losses."""
    return -torch.nn.functional.logsigmoid(scale * released_inclusion_test(x, y, eps)).mean()


def fixture(name):
    """(description, tensors) of `name`, which may have a folder; the test is skipped without them."""
    path = SHARED / "parity" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}; set SFUMATO_SHARED to the folder of the reference values")
    described, tensors = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))
    for key, expected in described["tensors"].items():
        assert list(tensors[key].shape) == expected["shape"], key
    return described, tensors

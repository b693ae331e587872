"""The numbers of released code for post-hoc uncertainty; shapes and hyper-parameters come from the fixtures."""

import torch
from support import parity


def fixture(name):
    """(description, tensors); the test is skipped without them."""
    return parity.fixture(f"posthoc/{name}")


def close(found, wanted, rtol=1e-10, atol=0.0):
    """Also in units of the largest value: a sum has the rounding of its terms, which may cancel."""
    single = torch.float32 in (found.dtype, wanted.dtype)
    atol = max(atol, (1e-6 if single else 1e-14) * float(wanted.detach().abs().max()))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, check_dtype=False)

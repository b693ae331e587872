"""The blocks of a batch, whoever holds them, add up to its loss and its gradients."""

import pytest
import torch
from support.batches import MATCH, batch

from sfumato.gaussian import GaussianEmbedding
from sfumato.losses import (
    LOSSES,
    DAAOptions,
    PairBlock,
    PCMEOptions,
    PCMEPPOptions,
    ProLIPOptions,
    PVSEOptions,
    loss_of_block,
)

GIVEN = {
    "pcme": PCMEOptions(uniformity_weight=0.5),  # Of a sum within a logarithm, which crosses all blocks.
    "prolip": ProLIPOptions(inclusion_weight=0.3, inclusion_scale=2.0, beta=0.1),
    "pvse": PVSEOptions(distance="nearest_of_3", mining="sum", mmd_weight=2),
    "daa": DAAOptions(asp_weight=2, temperature=0.5),
}


def build(name):
    return LOSSES[name](*([GIVEN[name]] if name in GIVEN else [])).double()


def leaves():
    return [t.requires_grad_() for e in batch(d=6) for t in (e.mean, e.log_var)]


def gradients(loss, inputs, total):
    total.backward()
    return [t.grad for t in inputs] + [p.grad for p in loss.parameters() if p.requires_grad]


@pytest.fixture(params=LOSSES)
def expected(request):
    loss, inputs = build(request.param), leaves()
    output = loss(GaussianEmbedding(*inputs[:2]), GaussianEmbedding(*inputs[2:]), MATCH)
    return request.param, output, gradients(loss, inputs, output.total)


def check(outputs, got, expected):
    _, whole, expected_gradients = expected
    torch.testing.assert_close(sum(o.total for o in outputs), whole.total, rtol=1e-12, atol=1e-12)
    terms = {name: sum(o.terms[name] for o in outputs) for name in whole.terms}
    torch.testing.assert_close(terms, whole.terms, rtol=1e-12, atol=1e-12)
    for name, value in whole.stats.items():
        torch.testing.assert_close(float(sum(o.stats[name] for o in outputs)), float(value))
    torch.testing.assert_close(got, expected_gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows, columns", [([4], [6]), ([1, 3], [4, 2]), ([2, 0, 1, 1], [0, 3, 1, 2])])
def test_uneven_and_empty_blocks_add_up(expected, rows, columns):
    loss, inputs = build(expected[0]), leaves()
    image, text = GaussianEmbedding(*inputs[:2]), GaussianEmbedding(*inputs[2:])
    blocks, r, c = [], 0, 0
    for more_rows, more_columns in zip(rows, columns, strict=True):
        own, other = slice(r, r + more_rows), slice(c, c + more_columns)
        blocks.append(PairBlock(image[own], text[other], image, text, MATCH[own], MATCH.T[other], r, c))
        r, c = r + more_rows, c + more_columns
    counts = torch.stack([loss.counts(block) for block in blocks])
    outputs = [loss_of_block(loss, block, gather=lambda _: counts) for block in blocks]
    check(outputs, gradients(loss, inputs, sum(o.total for o in outputs)), expected)


@pytest.mark.parametrize("max_pairs", [1, 7, 12, 1000])
def test_blocks_add_up(expected, max_pairs):
    loss, inputs = build(expected[0]), leaves()
    block = PairBlock.whole(GaussianEmbedding(*inputs[:2]), GaussianEmbedding(*inputs[2:]), MATCH, "test")
    blocks = list(block.split(max_pairs))
    assert len(blocks) == {1: 6, 7: 4, 12: 2, 1000: 1}[max_pairs]
    output = loss_of_block(loss, block, max_pairs=max_pairs)
    check([output], gradients(loss, inputs, output.total), expected)


def test_one_process_alone_would_average_over_too_little():
    """The tempting mistake: every process averages over its own pairs."""
    loss = LOSSES["pcmepp"](PCMEPPOptions(alpha=0, beta=0)).double()
    image, text = batch()
    block = PairBlock(image[:1], text[:3], image, text, MATCH[:1], MATCH.T[:3])
    right = loss_of_block(loss, block, gather=lambda _: torch.tensor([[24.0]], dtype=torch.float64)).total
    assert abs(loss_of_block(loss, block).total / right - 4) < 1e-9

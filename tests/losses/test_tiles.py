"""Sums in tiles against the whole matrix, sparse labels against dense ones, and what no pass may hold in memory."""

import dataclasses

import pytest
import torch
from support.batches import MATCH, batch
from support.largest import LargestTensor
from support.raising import raises

from sfumato import DISTANCES, LOSSES, GaussianEmbedding
from sfumato.losses.base import PairBlock, loss_of_block
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions

IN_TILES = [name for name, distance in DISTANCES.items() if distance.lift is not None]
leaves = lambda pair: [t.detach().clone().requires_grad_() for e in pair for t in (e.mean, e.log_var)]
embeddings = lambda tensors: (GaussianEmbedding(*tensors[:2]), GaussianEmbedding(*tensors[2:]))


def random_match(n, m, seed=0):
    """Soft and hard labels; some rows and columns have none."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.rand(n, m, generator=generator, dtype=torch.float64)
    hard = torch.rand(n, m, generator=generator) < 0.5
    label = torch.where(hard, label.round(), label) * (torch.rand(n, m, generator=generator) < 0.1)
    label[0], label[:, 1] = 0, 0
    return label


def value_and_gradients(loss, tensors, match, max_pairs):
    block = PairBlock.whole(*embeddings(tensors), match, "test")
    output = loss_of_block(loss, block, max_pairs=max_pairs)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    return output, torch.autograd.grad(output.total, [*tensors, *parameters], materialize_grads=True)


@pytest.mark.parametrize("distance", IN_TILES)
@pytest.mark.parametrize("name", ["pcmepp", "infonce"])
def test_tiles_are_the_whole_matrix(monkeypatch, name, distance):
    loss = LOSSES[name](LOSSES[name].Options(distance=distance)).double()
    tensors, match = leaves(batch(13, 17, 5)), random_match(13, 17)
    every = [value_and_gradients(loss, tensors, match, max_pairs) for max_pairs in (1, 40, 77, 2**20)]
    # From here on the distance has no vectors, so that autograd differentiates the whole matrix.
    monkeypatch.setitem(DISTANCES, distance, dataclasses.replace(DISTANCES[distance], lift=None))
    whole, expected = value_and_gradients(LOSSES[name](loss.options).double(), tensors, match, 2**20)
    for tiled, gradients in every:
        torch.testing.assert_close(tiled.terms, whole.terms, rtol=1e-12, atol=1e-14)
        assert {k: float(v) for k, v in tiled.stats.items()} == {k: float(v) for k, v in whole.stats.items()}
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("max_pairs", [5000, 2**22])
def test_float32_agrees_with_float64_to_a_millionth(max_pairs):
    match = random_match(150, 170)
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = leaves(e.to(dtype) for e in batch(150, 170, 64, dtype=torch.float32))
        loss = PCMEPPLoss(PCMEPPOptions(beta=0, logit_scale=0.2)).to(dtype)
        output, gradients = value_and_gradients(loss, tensors, match, max_pairs)
        results.append((output.total, *gradients))
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()


def test_a_learnt_batch_keeps_its_digits_and_means_far_from_the_origin_their_gradients():
    """ln(1 + exp(l)) at -12 is 6e-6: as the difference of 12 and 12.000006 it would keep one digit."""
    e = GaussianEmbedding.point(torch.eye(4, dtype=torch.float32))
    options = PCMEPPOptions(alpha=0, beta=0, logit_scale=12.0, logit_bias=12.0, free_scale=True)
    got = PCMEPPLoss(options)(e, e, torch.eye(4)).total
    expected = 2 * torch.nn.functional.softplus(torch.tensor(-12.0, dtype=torch.float64))
    assert abs(got.item() / expected.item() - 1) < 1e-6
    image, text = batch(8, 8, 6, dtype=torch.float64)
    far = torch.full((6,), 300.0, dtype=torch.float64)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        tensors = leaves(
            GaussianEmbedding((e.mean + far).float().to(dtype), e.log_var.to(dtype)) for e in (image, text)
        )
        loss = PCMEPPLoss(PCMEPPOptions(beta=0)).to(dtype)
        gradients.append(value_and_gradients(loss, tensors, torch.eye(8), 2**20)[1])
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_pairs", [10, 30, 100])
def test_ties_are_pseudo_positives_in_every_tile(max_pairs):
    """Copies of an item are exactly as close as the ground truth, wherever the tiles cut."""
    image, text = batch(3, 3, 64, dtype=torch.float32)
    copies = torch.tensor([0, 1, 2] * 3)
    match = torch.zeros(9, 9)
    match[:3, :3] = torch.eye(3)
    block = PairBlock.whole(image[copies], text[copies], match, "test")
    counts = loss_of_block(PCMEPPLoss(), block, max_pairs=max_pairs).stats
    # The ground truth of rows 0 to 2 has two copies each; other items may be closer as well.
    assert counts["pseudo_positives_i2t"] >= 6 and counts["pseudo_positives_t2i"] >= 6
    whole = PCMEPPLoss()(image[copies], text[copies], match).stats
    assert {k: float(v) for k, v in counts.items()} == {k: float(v) for k, v in whole.items()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_sparse_labels_are_dense_labels(name):
    loss = LOSSES[name]().double()
    tensors = leaves(batch())
    whole, expected = value_and_gradients(loss, tensors, MATCH, 2**20)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        for max_pairs in (7, 2**20):
            output, gradients = value_and_gradients(loss, tensors, MATCH.to_sparse(layout=layout), max_pairs)
            torch.testing.assert_close(output.total, whole.total, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_sparse_labels_are_checked_and_gradients_may_be_taken_again():
    image, text = batch()
    twice = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 1.0], (4, 6), check_invariants=True)
    raises(ValueError, r"match must lie in \[0, 1\], got values from 2 to 2", PCMEPPLoss(), image, text, twice)
    shape = r"match must have shape \(images, texts\) = \(4, 6\), got \(6, 4\)"
    raises(ValueError, shape, PCMEPPLoss(), image, text, MATCH.T.to_sparse())
    assert torch.isfinite(PCMEPPLoss()(image, text, torch.zeros(4, 6).to_sparse()).total)
    for name in ("infonce", "triplet"):
        for nothing in (torch.zeros(4, 6), torch.zeros(4, 6).to_sparse()):
            raises(ValueError, "no pair of the batch matches", LOSSES[name](), image, text, nothing)
    module = PCMEPPLoss().double()
    loss = lambda mean: module(GaussianEmbedding(mean, image.log_var), text, MATCH).total
    mean = image.mean.clone().requires_grad_()
    total = loss(mean)
    first, second = (torch.autograd.grad(total, mean, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(torch.func.grad(loss)(image.mean), first, rtol=1e-12, atol=1e-14)
    _, (of_both, *_) = value_and_gradients(module, leaves((image, text)), MATCH, 2**20)
    torch.testing.assert_close(of_both, first, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["pcmepp", "infonce"])
def test_a_large_batch_holds_no_matrix_of_its_pairs(name):
    n, d = 2100, 4
    tensors = leaves(batch(n, n, d, dtype=torch.float32))
    places = torch.arange(n).expand(2, -1)
    match = torch.sparse_coo_tensor(places, torch.ones(n), (n, n), check_invariants=True)
    loss = LOSSES[name]()
    with LargestTensor() as largest:
        loss(*embeddings(tensors), match).total.backward()
    assert n * d < largest.numel <= 2**22 < n * n
    assert all(torch.isfinite(t.grad).all() for t in (tensors[0], tensors[2]))

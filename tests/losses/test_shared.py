"""One battery for every loss in LOSSES; a new one needs its loop in references, FORMULAS its formula. Sums in tiles."""

import dataclasses
import functools
import inspect

import pytest
import torch
from support import references
from support.batches import MATCH, batch
from support.largest import LargestTensor
from support.raising import raises

import sfumato
from sfumato import DISTANCES, LOSSES, GaussianEmbedding
from sfumato.losses.base import PairBlock, loss_of_block
from sfumato.losses.contrastive import InfoNCEOptions, ProLIPOptions
from sfumato.losses.pcme import PCMEOptions
from sfumato.losses.pcmepp import PCMEPPLoss, PCMEPPOptions
from sfumato.losses.triplet import DAAOptions, PVSEOptions


@pytest.fixture(params=LOSSES)
def loss(request):
    return LOSSES[request.param](*([PCMEOptions(n_samples=2)] if request.param == "pcme" else [])).double()


def test_terms_sum_to_the_total_in_half_precision_and_autocast(loss):
    output = loss(*batch(), MATCH)
    torch.testing.assert_close(sum(output.terms.values()), output.total)
    assert output.total.ndim == 0 and torch.isfinite(output.total)
    assert all(not value.requires_grad for value in output.stats.values())
    image, text = batch(dtype=torch.float32)
    exact = loss.float()(image, text, MATCH).total
    half = loss(image.to(torch.bfloat16), text.to(torch.bfloat16), MATCH).total
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(loss(image, text, MATCH).total, exact, rtol=1e-6, atol=1e-6)


FORMULAS = [
    PCMEPPOptions(), PCMEPPOptions(distance="kl", infonce_weight=0.3), InfoNCEOptions(), InfoNCEOptions(distance="elk"),
    PCMEPPOptions(infonce_weight=0.3, pseudo_positives_from=1), ProLIPOptions(inclusion_weight=0.1),
    PCMEOptions(uniformity_weight=0.5, sigmoid="compressed", beta=0.2),
]  # fmt: skip


@pytest.mark.parametrize("options", FORMULAS)
def test_the_formula_of_a_whole_batch_is_the_module_with_its_gradients(options):
    found = []
    name = next(name for name, loss in LOSSES.items() if loss.Options is type(options))
    module, function = LOSSES[name](options).double(), getattr(sfumato, f"{name}_loss")
    wanted, given = inspect.signature(function).parameters, {"epoch": 0}
    if "logit_scale" in wanted:
        given |= {"logit_scale": module.logits.logit_scale, "logit_bias": module.logits.logit_bias}
    if getattr(module, "infonce", None) is not None:
        given["infonce_scale"] = module.infonce.logits.logit_scale
    formula = functools.partial(function, options=options, **{k: v for k, v in given.items() if k in wanted})
    for form in (functools.partial(module, epoch=0), formula):
        leaves = [t.requires_grad_() for e in batch(d=6) for t in (e.mean, e.log_var)]
        sides = GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:])
        output = form(*sides, MATCH * torch.tensor([1.0, 0, 1, 1]).unsqueeze(1))
        leaves += [p for p in module.parameters() if p.requires_grad]
        found.append((output.terms, torch.autograd.grad(output.total, leaves, materialize_grads=True)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_permuting_and_swapping_change_nothing_totals_are_the_loops_and_gradients_those_of_the_function(loss):
    image, text = batch()
    if hasattr(loss, "step"):  # It has random samples, which follow the position: almost points.
        image, text = (GaussianEmbedding(e.mean, torch.full_like(e.mean, -60)) for e in (image, text))
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 1, 4, 0, 2, 3])
    changed = loss(text[columns], image[rows], MATCH[rows][:, columns].T)
    torch.testing.assert_close(changed.total, loss(image, text, MATCH).total)
    lower, upper = MATCH.clone(), MATCH.clone()
    lower[0, 4], upper[0, 4] = 0, 1
    sides = [list(zip(e.mean.tolist(), e.var.tolist(), strict=True)) for e in (image, text)]
    name = next(name for name, entry in LOSSES.items() if type(loss) is entry)
    for match in (lower, MATCH, upper):
        expected = references.LOSS_TOTALS[name](*sides, match.tolist())
        # The scale is stored as a float32 logarithm, which is right to 1e-7.
        assert loss(image, text, match).total.item() == pytest.approx(expected, rel=1e-6)
    image, _ = batch(4, dtype=torch.float32)
    for distance in DISTANCES:
        leaves = [t[:1].expand(4, -1).clone().requires_grad_() for t in (image.mean, image.log_var)]
        e = GaussianEmbedding(*leaves)
        total = type(loss)(dataclasses.replace(type(loss).Options(), distance=distance))(e, e, torch.eye(4)).total
        assert all(g.isfinite().all() for g in torch.autograd.grad(total, leaves, materialize_grads=True)), distance
    image, text = batch(3, 3, 2)
    match = torch.eye(3, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (image.mean, image.log_var, text.mean, text.log_var)]
    function = lambda a, b, c, d: loss(GaussianEmbedding(a, b), GaussianEmbedding(c, d), match).total
    assert torch.autograd.gradcheck(function, inputs)


def test_shapes_emptiness_labels_and_options_are_checked(loss):
    image, text = batch()
    raises(ValueError, r"match must have shape \(images, texts\) = \(4, 6\), got \(6, 4\)", loss, image, text, MATCH.T)
    raises(ValueError, "empty batch of 0 images and 6 texts", loss, image[:0], text, MATCH[:0])
    message = r"match must lie in \[0, 1\], got values from -1 to 1; labels of -1 and 1"
    raises(ValueError, message, loss, image, text, 2 * MATCH.round() - 1)
    raises(ValueError, r"match must lie in \[0, 1\], got values from nan", loss, image, text, MATCH * torch.nan)
    totals = [loss(image, text, MATCH.round().to(dtype)).total for dtype in (torch.float64, torch.bool, torch.int64)]
    assert totals[0] == totals[1] == totals[2]
    defaults = type(loss).Options()
    for item in dataclasses.fields(defaults):
        for bound, wrong in (("gt", -0.5), ("ge", -1)):
            if bound in item.metadata:
                with pytest.raises(ValueError, match=rf"{type(defaults).__name__}: {item.name} must be .*got {wrong}"):
                    dataclasses.replace(defaults, **{item.name: wrong})
    other = next(entry.Options() for entry in LOSSES.values() if entry.Options is not type(defaults))
    raises(TypeError, rf"{type(loss).__name__}: needs \w+Options, got {type(other).__name__}", type(loss), other)


def summed(name, outputs_of):
    given = {
        # The uniformity is of a sum within a logarithm, which crosses all blocks.
        "pcme": PCMEOptions(uniformity_weight=0.5, n_samples=2),
        "prolip": ProLIPOptions(inclusion_weight=0.3, beta=0.1),
        "pvse": PVSEOptions(distance="nearest_of_3", mining="sum", mmd_weight=2),
        "daa": DAAOptions(asp_weight=2),
    }
    loss = LOSSES[name](*([given[name]] if name in given else [])).double()
    leaves = [t.requires_grad_() for e in batch(d=6) for t in (e.mean, e.log_var)]
    outputs = outputs_of(loss, GaussianEmbedding(*leaves[:2]), GaussianEmbedding(*leaves[2:]))
    add = lambda part: {key: sum(getattr(o, part)[key] for o in outputs) for key in getattr(outputs[0], part)}
    leaves += [p for p in loss.parameters() if p.requires_grad]
    total = sum(o.total for o in outputs)
    values = {"total": total, **add("terms")}, torch.autograd.grad(total, leaves, materialize_grads=True)
    return values, {key: float(value) for key, value in add("stats").items()}


@pytest.mark.parametrize("name", LOSSES)
def test_the_blocks_of_a_batch_whoever_holds_them_add_up_to_its_loss_and_gradients(name):
    def split(max_pairs):
        def outputs(loss, image, text):
            block = PairBlock.whole(image, text, MATCH, "test")
            assert len(list(block.split(max_pairs))) == {1: 6, 7: 4, 12: 2, 1000: 1}[max_pairs]
            return [loss_of_block(loss, block, max_pairs=max_pairs)]

        return outputs

    def uneven(rows, columns):
        def outputs(loss, image, text):
            blocks, r, c = [], 0, 0
            for more_rows, more_columns in zip(rows, columns, strict=True):
                own, other = slice(r, r + more_rows), slice(c, c + more_columns)
                blocks.append(PairBlock(image[own], text[other], image, text, MATCH[own], MATCH.T[other], r, c))
                r, c = r + more_rows, c + more_columns
            counts = torch.stack([loss.counts(block) for block in blocks])
            return [loss_of_block(loss, block, gather=lambda _: counts) for block in blocks]

        return outputs

    (values, gradients), stats = summed(name, lambda loss, image, text: [loss(image, text, MATCH)])
    sizes = ([4], [6]), ([1, 3], [4, 2]), ([2, 0, 1, 1], [0, 3, 1, 2])
    for outputs in (*map(split, (1, 7, 12, 1000)), *(uneven(*size) for size in sizes)):
        (found, found_gradients), found_stats = summed(name, outputs)
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-10, atol=1e-12)
        assert found_stats == pytest.approx(stats, rel=1e-5)


leaves = lambda pair: [t.detach().clone().requires_grad_() for e in pair for t in (e.mean, e.log_var)]
embeddings = lambda tensors: (GaussianEmbedding(*tensors[:2]), GaussianEmbedding(*tensors[2:]))


def value_and_gradients(loss, tensors, match, max_pairs):
    output = loss_of_block(loss, PairBlock.whole(*embeddings(tensors), match, "test"), max_pairs=max_pairs)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    return output, torch.autograd.grad(output.total, [*tensors, *parameters], materialize_grads=True)


@pytest.mark.parametrize("distance", [name for name, one in DISTANCES.items() if one.lift is not None])
@pytest.mark.parametrize("name", ["pcmepp", "infonce"])
def test_tiles_are_the_whole_matrix(monkeypatch, name, distance):
    loss = LOSSES[name](LOSSES[name].Options(distance=distance)).double()
    tensors, generator = leaves(batch(13, 17, 5)), torch.Generator().manual_seed(0)
    label = torch.rand(13, 17, generator=generator, dtype=torch.float64)
    hard, kept = (torch.rand(13, 17, generator=generator) < limit for limit in (0.5, 0.1))
    match = torch.where(hard, label.round(), label) * kept
    match[0], match[:, 1] = 0, 0
    every = [value_and_gradients(loss, tensors, match, max_pairs) for max_pairs in (1, 40, 77, 2**20)]
    # From here on the distance has no vectors, so that autograd differentiates the whole matrix.
    monkeypatch.setitem(DISTANCES, distance, dataclasses.replace(DISTANCES[distance], lift=None))
    whole, expected = value_and_gradients(LOSSES[name](loss.options).double(), tensors, match, 2**20)
    for tiled, gradients in every:
        torch.testing.assert_close(tiled.terms, whole.terms, rtol=1e-12, atol=1e-14)
        assert {k: float(v) for k, v in tiled.stats.items()} == {k: float(v) for k, v in whole.stats.items()}
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


def test_a_learnt_batch_keeps_its_digits_and_means_far_from_the_origin_their_gradients():
    """ln(1 + exp(l)) at -12 is 6e-6: as the difference of 12 and 12.000006 it would keep one digit."""
    e = GaussianEmbedding.point(torch.eye(4, dtype=torch.float32))
    options = PCMEPPOptions(alpha=0, beta=0, logit_scale=12.0, logit_bias=12.0, free_scale=True)
    expected = 2 * torch.nn.functional.softplus(torch.tensor(-12.0, dtype=torch.float64))
    assert abs(PCMEPPLoss(options)(e, e, torch.eye(4)).total.item() / expected.item() - 1) < 1e-6
    image, text = batch(8, 8, 6, dtype=torch.float64)
    far = torch.full((6,), 300.0, dtype=torch.float64)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        moved = [GaussianEmbedding((e.mean + far).float().to(dtype), e.log_var.to(dtype)) for e in (image, text)]
        loss = PCMEPPLoss(PCMEPPOptions(beta=0)).to(dtype)
        gradients.append(value_and_gradients(loss, leaves(moved), torch.eye(8), 2**20)[1])
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
    tensors, places = leaves(batch(n, n, d, dtype=torch.float32)), torch.arange(n).expand(2, -1)
    match = torch.sparse_coo_tensor(places, torch.ones(n), (n, n), check_invariants=True)
    loss = LOSSES[name]()
    with LargestTensor() as largest:
        loss(*embeddings(tensors), match).total.backward()
    assert n * d < largest.numel <= 2**22 < n * n
    assert all(torch.isfinite(t.grad).all() for t in (tensors[0], tensors[2]))

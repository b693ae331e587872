"""Gaussian heads: local attention against loops over single items, and offsets that are squared distances."""

import math

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato import GaussianEmbedding, find_recipe, load_recipe
from sfumato.distances import csd_matrix, squared_l2_matrix
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import GaussianHead, HeadOptions, TokenFeatures
from sfumato.encoders.scratch import WordEncoder
from sfumato.errors import UserError

LENGTHS = (5, 2, 1)


def features(*, local=False, log_var=False):
    """Three items of 5, 2 and 1 tokens of 8 channels; of their own for local attention 4, 1 and 3 of 6 channels."""
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    own = (torch.randn(3, 4, 6), torch.arange(4) < torch.tensor([[4], [1], [3]])) if local else (None, None)
    return TokenFeatures(torch.randn(3, 5, 8), mask, torch.randn(3, 5, 8) if log_var else None, *own)


def head_of(outputs=7, local_channels=None, **options):
    """A head whose weights are all of one size, so that each of them shows."""
    torch.manual_seed(1)
    head = GaussianHead(
        8, outputs, HeadOptions(pooling="average", local_attention=True, **options), local_channels=local_channels
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


rows = lambda values, mask, item: values[item][mask[item]].detach().numpy().astype(np.float64)


def linear(module, x):
    bias = 0 if module.bias is None else module.bias.detach().numpy().astype(np.float64)
    return x @ module.weight.detach().numpy().astype(np.float64).T + bias


def attended(local, tokens):
    scores = [float(linear(local.attention[2], np.tanh(linear(local.attention[0], token)))[0]) for token in tokens]
    total = sum(math.exp(score) for score in scores)
    mean = sum(math.exp(score) / total * token for score, token in zip(scores, tokens, strict=True))
    return linear(local.linear, mean)


def expected(head, tokens, item):
    values = tokens.mean if tokens.log_var is None else tokens.log_var
    local, mask = (tokens.local, tokens.local_mask) if tokens.local is not None else (None, tokens.mask)
    of_mean = rows(tokens.mean if local is None else local, mask, item)
    of_log_var = rows(values if local is None else local, mask, item)
    pooled = np.mean([linear(head.mean.linear, x) for x in rows(tokens.mean, tokens.mask, item)], 0)
    summed = pooled + 1 / (1 + np.exp(-attended(head.local, of_mean)))
    normal = (summed - summed.mean()) / np.sqrt(summed.var() + head.local_norm.eps)
    mean = normal * head.local_norm.weight.detach().numpy() + head.local_norm.bias.detach().numpy()
    log_var = np.mean([linear(head.log_var.linear, x) for x in rows(values, tokens.mask, item)], 0)
    local_log_var = attended(head.log_var_local, of_log_var)
    if head.log_var_local.squash:
        local_log_var = 1 / (1 + np.exp(-local_log_var))
    return mean / np.linalg.norm(mean), log_var + local_log_var


@pytest.mark.parametrize("covariance", ["ellipsoidal", "spherical-one"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("log_var", [False, True])
def test_mean_and_log_variance_are_pcmes_item_by_item(local, log_var, covariance):
    tokens = features(local=local, log_var=log_var)
    head = head_of(local_channels=6 if local else None, covariance=covariance)
    embedding = head(tokens)
    assert embedding.mean.shape == embedding.log_var.shape == (3, 7)
    for item in range(3):
        mean, of_variance = expected(head, tokens, item)
        np.testing.assert_allclose(embedding.mean[item].detach(), mean, atol=2e-5)
        np.testing.assert_allclose(embedding.log_var[item].detach(), np.broadcast_to(of_variance, 7), rtol=1e-4)


def test_the_ablations_of_table_d3_item_by_item():
    """Attention of the mean alone, of the log variance alone, and a sigmoid and a layer norm on the log variance."""
    tokens = features()
    plain = lambda branch, item: np.mean([linear(branch.linear, x) for x in rows(tokens.mean, tokens.mask, item)], 0)
    of_mean, of_variance = head_of(local_attention_of="mean"), head_of(local_attention_of="variance")
    squashed = head_of(variance_sigmoid=True, variance_norm=True)
    with torch.no_grad():
        squashed.log_var_norm.weight.fill_(1.5)
        squashed.log_var_norm.bias.fill_(0.25)
    assert of_mean.log_var_local is None and of_variance.local is None
    assert isinstance(of_variance.local_norm, torch.nn.Identity)
    for item in range(3):
        near = lambda found, right, item=item: np.testing.assert_allclose(found[item].detach(), right, atol=1e-4)
        near(of_mean(tokens).log_var, plain(of_mean.log_var, item))
        near(of_variance(tokens).mean, (m := plain(of_variance.mean, item)) / np.linalg.norm(m))
        of_tokens = attended(of_variance.log_var_local, rows(tokens.mean, tokens.mask, item))
        near(of_variance(tokens).log_var, plain(of_variance.log_var, item) + of_tokens)
        _, right = expected(squashed, tokens, item)
        right = (right - right.mean()) / np.sqrt(right.var() + squashed.log_var_norm.eps)
        near(squashed(tokens).log_var, 1.5 * right + 0.25)
    points = head_of(variance=False)
    points.load_state_dict({k: v for k, v in of_mean.state_dict().items() if not k.startswith("log_var")})
    torch.testing.assert_close(of_mean(tokens).mean, points(tokens).mean)


def test_local_attention_of_a_text_is_over_its_word_vectors_and_several_embeddings_keep_their_names():
    """The base are the GRU's final states; the first test is of these shapes."""
    torch.manual_seed(0)
    encoder, ids = WordEncoder(9, 4, 3, bidirectional=True), torch.randint(0, 9, (3, 5))
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    tokens = encoder(Inputs(ids, mask))
    torch.testing.assert_close(tokens.local, encoder.words(ids))
    assert tokens.local_mask is mask and tokens.mask is None and encoder.local_channels == 4
    names = set(GaussianHead(8, 5, HeadOptions(pooling="average", variance=False, embeddings=3)).state_dict())
    assert names == {
        *("local.attention.0.weight", "local.attention.2.weight", "local.linear.weight", "local.linear.bias"),
        *("local_norm.weight", "local_norm.bias", "mean.linear.weight", "mean.linear.bias"),
    }
    assert not any("local" in name for name in GaussianHead(8, 5).state_dict())


def heads(**options):
    torch.manual_seed(0)
    found = [GaussianHead(6, 4, HeadOptions(item_offset=True, **options), side=side) for side in ("image", "text")]
    for head in found:  # So that offsets differ between items.
        torch.nn.init.normal_(head.offset.linear.weight)
    return found


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"hidden": 8}, {"variance": False}])
def test_squared_distances_are_csd_of_the_offsets(options):
    image, text = heads(**options)
    tokens = [TokenFeatures(torch.randn(n, 3, 6), None) for n in (5, 7)]
    a, b = (head.eval()(t) for head, t in zip((image, text), tokens, strict=True))
    assert a.d == b.d == image.dim == 6
    offsets = [head.offset(t.mean, None)[:, 0].exp() for head, t in zip((image, text), tokens, strict=True)]
    log_vars = ((c / 4).log().unsqueeze(1).expand(-1, 4) for c in offsets)
    points = (GaussianEmbedding(e.mean[:, :4], log_var) for e, log_var in zip((a, b), log_vars, strict=True))
    torch.testing.assert_close(squared_l2_matrix(a, b), csd_matrix(*points), rtol=1e-5, atol=1e-5)
    assert all(c.std() > 0.01 for c in offsets)
    if options.get("normalize", True):
        torch.testing.assert_close(a.mean[:, :4].norm(dim=1), torch.ones(5))


def test_offsets_and_hidden_networks_start_as_stated_and_learn():
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(item_offset=True, init_total_variance=0.3), side="text")
    found = head(TokenFeatures(torch.randn(9, 1, 6), None))
    torch.testing.assert_close(found.mean[:, 5].square(), torch.full((9,), 0.3), rtol=0.05, atol=0.0)
    assert not found.mean[:, 4].any()
    found.mean.square().sum().backward()
    assert head.offset.linear.weight.grad.abs().sum() > 0
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(variance_hidden=8, init_total_variance=0.1)).eval()
    tokens = TokenFeatures(torch.randn(9, 2, 6), None)
    before = head(tokens)
    torch.nn.init.normal_(head.log_var_hidden[-1].weight)
    after = head(tokens)
    assert torch.equal(before.mean, after.mean) and not torch.equal(before.log_var, after.log_var)
    for recipe, change, message in (
        ("emoji-infonce", "model.variance_hidden=8", r"model\.variance_hidden is for variances"),
        ("emoji-pvse", "model.item_offset=true", r"model\.item_offset is for one embedding"),
    ):
        raises(UserError, message, load_recipe, find_recipe(recipe), [change])

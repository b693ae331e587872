"""Local attention in Gaussian heads against loops over single items, on the features of every kind of encoder."""

import math

import numpy as np
import pytest
import torch

from sfumato.encoders.encoder_protocol import Inputs, TokenFeatures
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.scratch import WordEncoder

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


def rows(values, mask, item):
    return values[item][mask[item]].detach().numpy().astype(np.float64)


def linear(module, x):
    bias = 0 if module.bias is None else module.bias.detach().numpy().astype(np.float64)
    return x @ module.weight.detach().numpy().astype(np.float64).T + bias


def attended(local, tokens):
    """The weighted mean of single tokens, mapped."""
    scores = [float(linear(local.attention[2], np.tanh(linear(local.attention[0], token)))[0]) for token in tokens]
    total = sum(math.exp(score) for score in scores)
    mean = sum(math.exp(score) / total * token for score, token in zip(scores, tokens, strict=True))
    return linear(local.linear, mean)


def expected(head, tokens, item):
    """Mean and log variance of an item, from the formulas of PCME."""
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


@pytest.mark.parametrize(
    "options",
    [
        {}, {"covariance": "spherical-one"}, {"variance_norm": True}, {"variance_mlp": True},
        {"variance_sigmoid": True}, {"variance_sigmoid": True, "variance_norm": True},
        {"local_attention_of": "variance"},
    ],
)  # fmt: skip
def test_the_small_start_of_the_variance_holds_with_local_attention(options):
    torch.manual_seed(0)
    head = GaussianHead(32, 64, HeadOptions(local_attention=True, init_total_variance=0.25, **options))
    embedding = head(TokenFeatures(3 * torch.randn(50, 7, 32)))
    assert embedding.total_variance.mean().item() == pytest.approx(0.25, rel=0.05)
    assert embedding.log_var.std(0).max() > 1e-4
    embedding.log_var.sum().backward()
    assert head.log_var_local.linear.bias.grad.abs().max() > 0 or "variance_norm" in options


def test_several_embeddings_keep_the_names_that_their_checkpoints_have():
    names = set(GaussianHead(8, 5, HeadOptions(pooling="average", variance=False, embeddings=3)).state_dict())
    assert names == {
        *("local.attention.0.weight", "local.attention.2.weight", "local.linear.weight", "local.linear.bias"),
        *("local_norm.weight", "local_norm.bias", "mean.linear.weight", "mean.linear.bias"),
    }
    assert not any("local" in name for name in GaussianHead(8, 5).state_dict())


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_text_tower_of_pcme_sees_a_text_alone_as_in_a_padded_batch(bidirectional):
    """GRU's final states as the base, attention over the word vectors."""
    torch.manual_seed(0)
    encoder = WordEncoder(9, 4, 3, bidirectional=bidirectional).double()
    head = GaussianHead(
        encoder.channels, 5, HeadOptions(pooling="average", local_attention=True), local_channels=encoder.local_channels
    ).double()
    ids = torch.randint(0, 9, (3, 5))
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    together = head(encoder(Inputs(ids, mask)))
    for item, length in enumerate(LENGTHS):
        alone = head(encoder(Inputs(ids[item : item + 1, :length])))
        torch.testing.assert_close(alone.mean, together.mean[item : item + 1])
        torch.testing.assert_close(alone.log_var, together.log_var[item : item + 1])
    tokens = encoder(Inputs(ids, mask))
    torch.testing.assert_close(tokens.local, encoder.words(ids))
    assert tokens.local_mask is mask and tokens.mask is None

"""Offsets in two dimensions of the mean: squared distances are csd with the offsets as total variances."""

import pytest
import torch

from sfumato.distances import csd_matrix, squared_l2_matrix
from sfumato.encoders.encoder_protocol import TokenFeatures
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.errors import UserError
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.recipe import find_recipe, load_recipe


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
    points = [
        GaussianEmbedding(e.mean[:, :4], (c / 4).log().unsqueeze(1).expand(-1, 4))
        for e, c in zip((a, b), offsets, strict=True)
    ]
    torch.testing.assert_close(squared_l2_matrix(a, b), csd_matrix(*points), rtol=1e-5, atol=1e-5)
    assert all(c.std() > 0.01 for c in offsets)
    if options.get("normalize", True):
        torch.testing.assert_close(a.mean[:, :4].norm(dim=1), torch.ones(5))


def test_offsets_start_near_the_initial_variance_and_learn():
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(item_offset=True, init_total_variance=0.3), side="text")
    found = head(TokenFeatures(torch.randn(9, 1, 6), None))
    torch.testing.assert_close(found.mean[:, 5].square(), torch.full((9,), 0.3), rtol=0.05, atol=0.0)
    assert not found.mean[:, 4].any()
    found.mean.square().sum().backward()
    assert head.offset.linear.weight.grad.abs().sum() > 0


def test_several_embeddings_have_no_offsets():
    with pytest.raises(UserError, match=r"model\.item_offset is for one embedding"):
        load_recipe(find_recipe("emoji-pvse"), ["model.item_offset=true"])


def test_a_hidden_network_of_the_log_variance():
    torch.manual_seed(0)
    head = GaussianHead(6, 4, HeadOptions(variance_hidden=8, init_total_variance=0.1)).eval()
    tokens = TokenFeatures(torch.randn(9, 2, 6), None)
    before = head(tokens)
    torch.testing.assert_close(before.total_variance, torch.full((9,), 0.1), rtol=0.1, atol=0.0)
    torch.nn.init.normal_(head.log_var_hidden[-1].weight)
    after = head(tokens)
    assert torch.equal(before.mean, after.mean) and not torch.equal(before.log_var, after.log_var)
    with pytest.raises(UserError, match=r"model\.variance_hidden is for variances"):
        load_recipe(find_recipe("emoji-infonce"), ["model.variance_hidden=8"])

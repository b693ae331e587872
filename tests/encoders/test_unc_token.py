"""The [UNC] token: where it looks, what it leaves alone. The released weights are in test_hub.py."""

import pytest
import torch
from support.raising import raises

pytest.importorskip("tokenizers", reason="the extra backbones is not installed")

from sfumato.encoders import clip
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.encoders.heads import POOLINGS, GaussianHead, HeadOptions

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2}
OF_IMAGE = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "patch_size": 8}
IMAGE = {
    "backbone": SIZES | OF_IMAGE | {"image_size": 24}, "pixel_mean": (0.4, 0.5, 0.6), "pixel_std": (0.2, 0.3, 0.4)
}  # fmt: skip
OF_TEXT = {"model_type": "clip_text_model", "hidden_size": 12, "intermediate_size": 20, "vocab_size": 30}
OF_TEXT |= {"max_position_embeddings": 7, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
TEXT = {"backbone": SIZES | OF_TEXT}


def image_encoder(**options):
    torch.manual_seed(0)
    inner = clip.clip_image_encoder(clip.ClipImageConfig(variance_blocks=0, final_norm=True), description=IMAGE)
    return clip.UncTokenImageEncoder(inner, **options).eval()


def text_encoder(**options):
    torch.manual_seed(0)
    return clip.UncTokenTextEncoder(
        clip.clip_text_encoder(clip.ClipTextConfig(variance_blocks=0), description=TEXT), **options
    ).eval()


PIXELS = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 30, (4, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.arange(6) < torch.tensor([6, 2, 3, 1]).unsqueeze(1)


def test_norms_of_the_image_mean_and_what_the_variance_token_moves():
    clean, released = image_encoder(), image_encoder(released=True)
    torch.nn.init.normal_(clean.encoder.norm_out.weight)
    torch.nn.init.normal_(clean.encoder.norm_out.bias)
    released.load_state_dict(clean.state_dict())
    once, twice = clean(Inputs(PIXELS)), released(Inputs(PIXELS))
    torch.testing.assert_close(twice.mean, clean.encoder.norm_out(once.mean))
    torch.testing.assert_close(twice.log_var, once.log_var)
    assert (twice.mean - once.mean).abs().max() > 0.1
    encoder = image_encoder()
    before = encoder(Inputs(PIXELS))
    torch.nn.init.normal_(encoder.variance_token)
    after = encoder(Inputs(PIXELS))
    assert (after.log_var - before.log_var).abs().max() > 0.1 and (after.mean - before.mean).abs().max() > 1e-3
    names = [f"encoder.shared_blocks.{k}.mlp.fc1.weight" for k in (1, 0)] + ["encoder.embeddings.class_embedding"]
    assert [encoder.blocks_from_top(name) for name in (*names, "variance_token")] == [1, 2, 0, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_influence_on_texts(causal):
    encoder = text_encoder()
    encoder.causal = causal
    together, other_padding = encoder(Inputs(IDS.masked_fill(~MASK, 0), MASK)), encoder(Inputs(IDS, MASK))
    head = GaussianHead(12, 5, HeadOptions(pooling="last")).eval()
    torch.testing.assert_close(head(together).mean, head(other_padding).mean)
    torch.testing.assert_close(together.log_var, other_padding.log_var)
    for i, n in enumerate(MASK.sum(1).tolist()):
        alone = encoder(Inputs(IDS[i : i + 1, :n], MASK[i : i + 1, :n]))
        torch.testing.assert_close(alone.log_var, together.log_var[i : i + 1])
        torch.testing.assert_close(head(alone).mean, head(together).mean[i : i + 1])


def test_a_causal_text_does_not_see_what_is_appended_and_as_released_it_fills_the_context():
    plain = clip.clip_text_encoder(clip.ClipTextConfig(variance_blocks=0), description=TEXT).eval()
    encoder = clip.UncTokenTextEncoder(plain).eval()
    assert encoder.causal
    torch.testing.assert_close(encoder(Inputs(IDS, MASK)).mean[MASK], plain(Inputs(IDS, MASK)).mean[MASK])
    torch.testing.assert_close(encoder(Inputs(IDS)).mean, plain(Inputs(IDS)).mean)
    free = clip.UncTokenTextEncoder(plain).eval()
    free.causal = False
    assert (free(Inputs(IDS, MASK)).mean - plain(Inputs(IDS, MASK)).mean)[MASK].abs().max() > 1e-3
    encoder, whole = text_encoder(released=True), torch.nn.functional.pad(IDS, (0, 1), value=1)
    tokens = encoder(Inputs(whole))
    assert tokens.mean.shape == (4, 1, 12) and tokens.log_var is None
    raises(ValueError, "padded to 7 tokens", encoder, Inputs(IDS))
    raises(ValueError, "all of them in the mask", encoder, Inputs(whole, torch.nn.functional.pad(MASK, (0, 1))))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_takes_the_variance_token_as_it_is(pooling):
    torch.manual_seed(0)
    head, tokens = GaussianHead(12, 5, HeadOptions(pooling=pooling)).eval(), text_encoder()(Inputs(IDS, MASK))
    torch.testing.assert_close(head(tokens).log_var, head.log_var.linear(tokens.log_var[:, 0]))

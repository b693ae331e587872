"""Residual networks of transformers as image towers: maps, pixels, descriptions and what is refused."""

import pytest
import torch
from support.lazy import Lazy
from support.raising import raises
from support.tiny_models import tiny_resnet

from sfumato.encoders.convolutional import ResNetImageConfig, resnet_encoder
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.errors import UserError

transformers = Lazy("transformers", "the extra backbones is not installed")


def pixels(n=2, size=64):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def saved(folder, **processor):
    model = tiny_resnet(folder, **processor)
    for buffer in model.buffers():  # Running statistics other than those of a new network.
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("normalised", [True, False])
def test_features_of_a_saved_model_are_its_last_map_of_standardised_pixels(tmp_path, normalised):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    plain = saved(tmp_path, do_normalize=normalised, image_mean=list(mean), image_std=list(std))
    encoder = resnet_encoder(ResNetImageConfig(weights=str(tmp_path))).eval()
    values = pixels()
    of_plain = values / 255
    if normalised:
        of_plain = (of_plain - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    maps = plain(of_plain).last_hidden_state
    tokens = encoder(Inputs(values))
    assert tokens.mask is None and tokens.mean.shape == (2, maps.shape[2] * maps.shape[3], 8) and encoder.channels == 8
    for row in range(maps.shape[2]):
        for column in range(maps.shape[3]):
            torch.testing.assert_close(tokens.mean[:, row * maps.shape[3] + column], maps[:, :, row, column])
    torch.testing.assert_close(encoder(Inputs(values / 255)).mean, tokens.mean)
    again = resnet_encoder(ResNetImageConfig(weights="nobody looks it up"), description=encoder.description).eval()
    again.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(again(Inputs(values)).mean, tokens.mean, rtol=0, atol=0)
    assert again.description == encoder.description


def test_what_is_no_resnet_is_refused(tmp_path):
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    raises(UserError, "model.image.weights must name a ResNet", resnet_encoder, ResNetImageConfig())
    message = "a model of type 'vit'; kind 'resnet' takes type 'resnet' only"
    raises(UserError, message, resnet_encoder, ResNetImageConfig(weights=str(tmp_path)))

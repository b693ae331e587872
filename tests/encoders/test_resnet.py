"""Residual networks of transformers as image towers: maps, pixels, descriptions and what is refused."""

import pytest
import torch
from support.lazy import Lazy

from sfumato.encoders.convolutional import RESNETS, ResNetImageConfig, resnet_encoder
from sfumato.encoders.features import Inputs
from sfumato.errors import UserError

transformers = Lazy("transformers", "the extra backbones is not installed")


def pixels(n=2, size=64):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def saved(folder, **processor):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic")
    model = transformers.ResNetModel(config)
    for buffer in model.buffers():  # Running statistics other than those of a new network.
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}, **processor).save_pretrained(folder)
    return model.eval()


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
    assert tokens.mask is None and tokens.mean.shape == (2, maps.shape[2] * maps.shape[3], 6) and encoder.channels == 6
    for row in range(maps.shape[2]):
        for column in range(maps.shape[3]):
            torch.testing.assert_close(tokens.mean[:, row * maps.shape[3] + column], maps[:, :, row, column])
    torch.testing.assert_close(encoder(Inputs(values / 255)).mean, tokens.mean)


def test_an_encoder_is_built_again_from_its_description(tmp_path):
    saved(tmp_path, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    first = resnet_encoder(ResNetImageConfig(weights=str(tmp_path))).eval()
    again = resnet_encoder(
        ResNetImageConfig(weights="a name that nobody looks up"), description=first.description
    ).eval()
    again.load_state_dict(first.state_dict())
    torch.testing.assert_close(again(Inputs(pixels())).mean, first(Inputs(pixels())).mean, rtol=0, atol=0)
    assert again.description == first.description


# Parameters without the last linear layer: torchvision's resnet18 and so on have 11,689,512, 21,797,672, 25,557,032,
# 44,549,160 and 60,192,808, of which the layer to a thousand classes has 513,000 or 2,049,000.
SIZES = {
    "resnet-18": 11_176_512, "resnet-34": 21_284_672, "resnet-50": 23_508_032, "resnet-101": 42_500_160,
    "resnet-152": 58_143_808,
}  # fmt: skip


@pytest.mark.parametrize("name", RESNETS)
def test_architectures_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        encoder = resnet_encoder(ResNetImageConfig(architecture=name))
    assert sum(p.numel() for p in encoder.parameters()) == SIZES[name]
    assert encoder.channels == (512 if name in ("resnet-18", "resnet-34") else 2048)


def test_four_stages_leave_seven_by_seven_cells_of_224_pixels():
    encoder = resnet_encoder(ResNetImageConfig(depths=(1, 1, 1, 1), width=2)).eval()
    assert encoder(Inputs(pixels(1, 224))).mean.shape == (1, 49, 16)


def test_what_is_no_resnet_is_refused(tmp_path):
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a model of type 'vit'; kind 'resnet' takes type 'resnet' only"):
        resnet_encoder(ResNetImageConfig(weights=str(tmp_path)))

"""The released checkpoints of PCME (2021), ``pcme_coco.pth`` and ``pcme_cutmix_coco.pth``: names, words, images.

Every command of sfumato reads them with ``--import papers/data/pcme2021.py``.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from sfumato.data.image_decoding import decode_image
from sfumato.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from sfumato.encoders.convolutional import ResNetEncoder, ResNetImageConfig, resnet_encoder
from sfumato.encoders.heads import GaussianHead, HeadOptions
from sfumato.encoders.processors import BilinearProcessor, TokenProcessor
from sfumato.encoders.scratch import WordEncoder
from sfumato.errors import UserError
from sfumato.matching import SampledLogits
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.pretrained import FOREIGN
from sfumato.models.pretrained_tensors import Layout, below, check_tensors, number_of

IMAGE_SIZE, RESIZED = 224, 256
"""Side of PCME's images in pixels, and length of the shorter side from which their centre is cut."""

TEST_SAMPLES = 7
"""Samples of each embedding in all experiments of Chun et al., CVPR 2021."""

_MAX_WORDS = 512

_SPECIAL = ("<start>", "<end>", "<unk>")


class CentreProcessor(BilinearProcessor):
    """The shorter side resized bilinearly, then the centre cut out."""

    def prepare(self, data: bytes | str) -> np.ndarray:
        """See :class:`~sfumato.encoders.processors.PixelProcessor`."""
        image = Image.fromarray(
            decode_image(data if isinstance(data, bytes) else data.encode(), None).transpose(1, 2, 0)
        )
        width, height = (int(RESIZED * side / min(image.size)) for side in image.size)
        left, top = (round((side - self.size) / 2) for side in (width, height))
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(resized.crop((left, top, left + self.size, top + self.size))).transpose(2, 0, 1)


def pcme_training(content: Mapping[str, Any], tokenizer: Tokenizer | None, where: str) -> tuple[Layout, str] | None:
    """A checkpoint of the PCME code, None for any other: residual network, words and two-way GRU, local attention.

    The code samples with deviations exp(l), l being what its heads return: the log variance is 2 l. Both directions of
    a GRU are read at the last word. Images are prepared as in that code's evaluation, and words are split as by the
    Penn Treebank, except that sentences are not looked for: every word that ends in a period loses it, unless it is a
    letter or an abbreviation with periods inside.

    Source: https://github.com/naver-ai/pcme.
    """
    if "word2idx" not in content and not any(str(key).startswith("img_enc.cnn.") for key in content):
        return None
    tensors, words, logits = (content.get(key) for key in ("model", "word2idx", "criterion"))
    if not (isinstance(tensors, Mapping) and isinstance(words, Mapping) and isinstance(logits, Mapping)):
        raise UserError(
            f"{where}: a checkpoint of PCME needs model, word2idx and criterion; it has {', '.join(map(str, content))}."
            " A bare state dict has no words: give the released file"
        )
    for anchor in ("img_enc.cnn.conv1.weight", "img_enc.fc.weight", "txt_enc.embed.weight"):
        if not isinstance(tensors.get(anchor), Tensor):
            raise UserError(f"{where}: {anchor!r} is missing; not a complete model of the PCME code")
    check_tensors(logits, {"negative_scale": (1,), "shift": (1,)}, f"{where}: criterion")
    dim, (count, width) = len(tensors["img_enc.fc.weight"]), tensors["txt_enc.embed.weight"].shape
    if len(words) != count:
        raise UserError(f"{where}: {len(words)} words in word2idx for {count} word vectors; is the file complete?")
    network = _network(tensors, where)
    text = WordEncoder(count, width, dim // 2, bidirectional=True, states="all")
    heads = {
        "image": GaussianHead(network.channels, dim, HeadOptions(pooling="average", local_attention=True)),
        "text": GaussianHead(dim, dim, HeadOptions(pooling="last", local_attention=True), local_channels=width),
    }
    words_of = TokenProcessor(tokenizer or treebank_tokenizer(words, where), _MAX_WORDS)
    model = DualEncoder(
        Tower(CentreProcessor(IMAGE_SIZE), network, heads["image"]), Tower(words_of, text, heads["text"])
    )
    names = {ours: _released_name(ours) for ours in model.state_dict()}
    expected = {names[ours]: tuple(value.shape) for ours, value in model.state_dict().items() if names[ours]}
    check_tensors(tensors, expected, where)
    state = {ours: tensors[released] for ours, released in names.items() if released}
    state |= {ours: 2 * value for ours, value in state.items() if re.search(r"head\.log_var(_local)?\.linear", ours)}
    # The states of the released GRU pass no linear map, and a log variance is twice the logarithm of a deviation.
    for branch, factor in (("mean", 1.0), ("log_var", 2.0)):
        name = f"text.head.{branch}.linear"
        state |= {f"{name}.weight": factor * torch.eye(dim), f"{name}.bias": torch.zeros(dim)}
    a, b = (number_of(logits[name]) for name in ("negative_scale", "shift"))
    if a <= 0:
        raise UserError(f"{where}: criterion.negative_scale is {a:g}; a positive number makes closer samples likelier")
    layout = Layout(model, state, 1.0, 0.0, "squared_l2", SampledLogits(2 * a, 2 * b, TEST_SAMPLES))
    return layout, f"PCME training, a = {a:.4g} and b = {b:.4g} of samples"


FOREIGN.append(pcme_training)


def _network(tensors: Mapping[str, Any], where: str) -> ResNetEncoder:
    """A residual network of the sizes of the released one, with random weights."""
    cnn = below("img_enc.cnn.", tensors)
    stages = 1 + max((int(key[5]) for key in cnn if re.match(r"layer\d\.", key)), default=0)
    depths, channels = [], []
    kind = "bottleneck" if "layer1.0.conv3.weight" in cnn else "basic"
    for stage in range(1, stages):
        blocks = {int(key.split(".")[1]) for key in cnn if key.startswith(f"layer{stage}.")}
        last = cnn.get(f"layer{stage}.0.conv{3 if kind == 'bottleneck' else 2}.weight")
        if not blocks or not isinstance(last, Tensor):
            raise UserError(f"{where}: 'img_enc.cnn.layer{stage}.0' is incomplete; not a residual network")
        depths.append(len(blocks))
        channels.append(len(last))
    if not depths:
        raise UserError(f"{where}: 'img_enc.cnn.layer1' is missing; not a residual network")
    sizes = {"embedding_size": len(cnn["conv1.weight"]), "hidden_sizes": channels, "depths": depths}
    pixels = {"pixel_mean": IMAGENET_MEAN, "pixel_std": IMAGENET_STD}
    return resnet_encoder(ResNetImageConfig(), description=pixels | {"backbone": sizes | {"layer_type": kind}})


_RENAMED = (
    (r"image\.encoder\.network\.embedder\.embedder\.convolution", "img_enc.cnn.conv1"),
    (r"image\.encoder\.network\.embedder\.embedder\.normalization", "img_enc.cnn.bn1"),
    (r"text\.encoder\.words", "txt_enc.embed"),
    (r"text\.encoder\.mean_gru", "txt_enc.rnn"),
    (r"text\.encoder\.variance_gru", "txt_enc.uncertain_net.rnn"),
    (r"image\.head\.mean\.linear", "img_enc.fc"),
    (r"image\.head\.log_var\.linear", "img_enc.uncertain_net.fc2"),
    (r"text\.head\.(mean|log_var)\.linear", ""),
    (r"(image|text)\.head\.local_norm", "{0}.pie_net.layer_norm"),
    (r"(image|text)\.head\.local\.linear", "{0}.pie_net.fc"),
    (r"(image|text)\.head\.local\.attention\.(0|2)", "{0}.pie_net.attention.w_{1}"),
    (r"(image|text)\.head\.log_var_local\.linear", "{0}.uncertain_net.fc"),
    (r"(image|text)\.head\.log_var_local\.attention\.(0|2)", "{0}.uncertain_net.attention.w_{1}"),
)

_TOWERS, _ATTENTION = {"image": "img_enc", "text": "txt_enc"}, {"0": "1", "2": "2"}

_BLOCK = re.compile(
    r"image\.encoder\.network\.encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:layer\.(\d+)|shortcut)"
    r"\.(convolution|normalization)\.(\w+)"
)


def _released_name(ours: str) -> str:
    """The released name of a tensor; "" for a map that the released model does not have."""
    if block := _BLOCK.fullmatch(ours):
        stage, layer, number, kind, last = block.groups()
        part = f"{'conv' if kind == 'convolution' else 'bn'}{int(number) + 1}" if number else "downsample."
        part += "" if number else "0" if kind == "convolution" else "1"
        return f"img_enc.cnn.layer{int(stage) + 1}.{layer}.{part}.{last}"
    for pattern, released in _RENAMED:
        if found := re.fullmatch(rf"{pattern}\.(\w+)", ours):
            *groups, last = (_TOWERS.get(group, _ATTENTION.get(group, group)) for group in found.groups())
            return f"{released.format(*groups)}.{last}" if released else ""
    raise ValueError(f"_released_name: no released name for {ours!r}")


def treebank_tokenizer(words: Mapping[str, int], where: str) -> Tokenizer:
    """A tokenizer of whole words: lower case, punctuation and contractions split as by the Penn Treebank."""
    if missing := [word for word in _SPECIAL if word not in words]:
        raise UserError(f"{where}: word2idx has no {missing[0]!r}; expected {', '.join(_SPECIAL)} among its words")
    tokenizer = Tokenizer(models.WordLevel(dict(words), unk_token="<unk>"))
    quotes = (Regex(r'^"'), "``"), (Regex(r'(?<=[\s(\[{<])"'), "``"), ('"', "''")
    replaced = (normalizers.Replace(*one) for one in quotes)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *replaced])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS)]
    )
    ends = [(word, words[word]) for word in _SPECIAL[:2]]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.enable_truncation(_MAX_WORDS)
    return tokenizer


# Within words without white space. The last two split contractions: at their ends, and words that hide two.
_SPLITS = (
    r"\.{2,}|--|``|''|[;@#$%&?!*()\[\]{}<>]",
    r"[:,](?!\d)",
    r"(?<!^\w)(?<!\.\w)(?<!\.)\.$",
    r"(?:n't|'(?:ll|re|ve|s|m|d)|(?<=[^'])')$",
    r"^(?:can(?=not$)|gon(?=na$)|wan(?=na$)|got(?=ta$)|gim(?=me$)|lem(?=me$)|'t(?=(?:is|was)$))",
)

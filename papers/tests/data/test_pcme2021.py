"""Checkpoints of PCME: a synthetic one with the released names, and its embeddings computed from those names alone."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.raising import raises
from torch.nn import functional as F

pytest.importorskip("tokenizers", reason="the extra backbones is not installed")

from papers.data import pcme2021
from sfumato.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from sfumato.distances.distance import seeded_samples
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.errors import UserError
from sfumato.models.pretrained import load_pretrained

DIM, WIDTH, CHANNELS = 12, 10, 32
WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "red", "dog", "n't", "ca", "run", "."]


def norm(name, channels):
    return {
        f"{name}.weight": torch.rand(channels) + 0.5,
        f"{name}.bias": torch.randn(channels),
        f"{name}.running_mean": torch.randn(channels),
        f"{name}.running_var": torch.rand(channels) + 0.5,
        f"{name}.num_batches_tracked": torch.tensor(3),
    }


def linear(name, out, into):
    return {f"{name}.weight": torch.randn(out, into) / into**0.5, f"{name}.bias": torch.randn(out)}


def attention(name, width, dim, *, pie):
    own = {
        f"{name}.attention.w_1.weight": torch.randn(width // 2, width) / width**0.5,
        f"{name}.attention.w_2.weight": torch.randn(1, width // 2),
        **linear(f"{name}.fc", dim, width),
    }
    return own | (linear(f"{name}.layer_norm", dim, 1) if pie else {})


def gru(name):
    reader = torch.nn.GRU(WIDTH, DIM // 2, bidirectional=True, batch_first=True)
    return {f"{name}.{key}": torch.randn_like(value) for key, value in reader.state_dict().items()}


@pytest.fixture
def checkpoint():
    """Two stages of bottleneck blocks, one and two of them; the names are those of torchvision and of the PCME code."""
    torch.manual_seed(0)
    cnn = {"conv1.weight": torch.randn(8, 3, 7, 7) / 12, **norm("bn1", 8)}
    into = 8
    for stage, (blocks, out) in enumerate([(1, 16), (2, CHANNELS)], 1):
        for i in range(blocks):
            name, inner = f"layer{stage}.{i}", out // 4
            cnn |= {
                f"{name}.conv1.weight": torch.randn(inner, into, 1, 1) / into**0.5,
                f"{name}.conv2.weight": torch.randn(inner, inner, 3, 3) / (9 * inner) ** 0.5,
                f"{name}.conv3.weight": torch.randn(out, inner, 1, 1) / inner**0.5,
                **norm(f"{name}.bn1", inner),
                **norm(f"{name}.bn2", inner),
                **norm(f"{name}.bn3", out),
            }
            if i == 0:
                cnn |= {f"{name}.downsample.0.weight": torch.randn(out, into, 1, 1) / into**0.5}
                cnn |= norm(f"{name}.downsample.1", out)
            into = out
    model = {f"img_enc.cnn.{key}": value for key, value in cnn.items()}
    model |= linear("img_enc.fc", DIM, CHANNELS) | linear("img_enc.uncertain_net.fc2", DIM, CHANNELS)
    for name, width in (("img_enc", CHANNELS), ("txt_enc", WIDTH)):
        model |= attention(f"{name}.pie_net", width, DIM, pie=True)
        model |= attention(f"{name}.uncertain_net", width, DIM, pie=False)
        model[f"{name}.pie_net.layer_norm.weight"] = torch.rand(DIM) + 0.5
    model |= {"txt_enc.embed.weight": torch.randn(len(WORDS), WIDTH)} | gru("txt_enc.rnn")
    model |= gru("txt_enc.uncertain_net.rnn")
    return {
        "model": model,
        "criterion": {"shift": torch.tensor([14.5]), "negative_scale": torch.tensor([15.25])},
        "optimizer": {"state": {}},
        "config": {"model": {"name": "pcme", "embed_dim": DIM}},
        "word2idx": {word: i for i, word in enumerate(WORDS)},
        "metadata": {"best": np.float64(1.0)},
    }


@pytest.fixture
def path(checkpoint, tmp_path):
    torch.save(checkpoint, tmp_path / "pcme_coco.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "pcme_coco.pth"


def normed(x, t, name):
    stats = (t[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *stats)


def local(x, t, name):
    """softmax over the positions of w_2 tanh(w_1 x), then the linear map of the attended mean."""
    score = torch.tanh(x @ t[f"{name}.attention.w_1.weight"].T) @ t[f"{name}.attention.w_2.weight"].T
    return F.linear((score.softmax(0) * x).sum(0), t[f"{name}.fc.weight"], t[f"{name}.fc.bias"])


def mean_of(base, residual, t, name):
    norm_of = (t[f"{name}.pie_net.layer_norm.{key}"] for key in ("weight", "bias"))
    return F.normalize(F.layer_norm(base + residual.sigmoid(), (DIM,), *norm_of), dim=-1)


def released_image(pixels, t):
    """(3, s, s) standardised pixels -> mean and logarithm of the deviations."""
    x = F.relu(normed(F.conv2d(pixels[None], t["img_enc.cnn.conv1.weight"], stride=2, padding=3), t, "img_enc.cnn.bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, blocks in ((1, 1), (2, 2)):
        for i in range(blocks):
            name, stride = f"img_enc.cnn.layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
            y = F.relu(normed(F.conv2d(x, t[f"{name}.conv1.weight"]), t, f"{name}.bn1"))
            y = F.relu(normed(F.conv2d(y, t[f"{name}.conv2.weight"], stride=stride, padding=1), t, f"{name}.bn2"))
            y = normed(F.conv2d(y, t[f"{name}.conv3.weight"]), t, f"{name}.bn3")
            if i == 0:
                x = normed(F.conv2d(x, t[f"{name}.downsample.0.weight"], stride=stride), t, f"{name}.downsample.1")
            x = F.relu(x + y)
    cells = x[0].flatten(1).T
    pooled = cells.mean(0)
    base, other = (
        F.linear(pooled, t[f"img_enc.{layer}.weight"], t[f"img_enc.{layer}.bias"])
        for layer in ("fc", "uncertain_net.fc2")
    )
    mean = mean_of(base, local(cells, t, "img_enc.pie_net"), t, "img_enc")
    return mean, other + local(cells, t, "img_enc.uncertain_net")


def last_states(words, t, name):
    """The states of both directions at the last word: the backward one has read that word only."""
    reader = torch.nn.GRU(WIDTH, DIM // 2, bidirectional=True, batch_first=True)
    reader.load_state_dict({key: t[f"{name}.{key}"] for key in reader.state_dict()})
    return reader(words[None])[0][0, -1]


def released_text(ids, t):
    words = t["txt_enc.embed.weight"][ids]
    mean = mean_of(last_states(words, t, "txt_enc.rnn"), local(words, t, "txt_enc.pie_net"), t, "txt_enc")
    return mean, last_states(words, t, "txt_enc.uncertain_net.rnn") + local(words, t, "txt_enc.uncertain_net")


@torch.no_grad()
def test_embeddings_are_those_of_the_released_layers(path, checkpoint):
    loaded = load_pretrained(path)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 401, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    sides = (int(256 * 401 / 300), 256)  # The shorter side 256; the centre of 342 x 256 starts at (59, 16).
    centre = Image.fromarray(pixels).resize(sides, Image.Resampling.BILINEAR).crop((59, 16, 59 + 224, 16 + 224))
    standard = (np.asarray(centre) / 255 - IMAGENET_MEAN) / IMAGENET_STD
    mean, log_sigma = released_image(torch.from_numpy(standard).float().permute(2, 0, 1), checkpoint["model"])
    ours = loaded.model.embed_images([buffer.getvalue()])
    torch.testing.assert_close(ours.mean[0], mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.log_var[0], 2 * log_sigma, rtol=1e-4, atol=1e-4)

    number = checkpoint["word2idx"]
    for text, words in (
        ("A red dog can't run.", ["<start>", "a", "red", "dog", "ca", "n't", "run", ".", "<end>"]),
        ("a blue dog", ["<start>", "a", "<unk>", "dog", "<end>"]),
    ):
        mean, log_sigma = released_text(torch.tensor([number[word] for word in words]), checkpoint["model"])
        ours = loaded.model.embed_texts([text, "a red red red red red red red red red red dog"])[:1]
        torch.testing.assert_close(ours.mean[0], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.log_var[0], 2 * log_sigma, rtol=1e-4, atol=1e-5)


def test_the_logits_are_those_of_samples_and_are_told(path):
    loaded = load_pretrained(path)
    assert (loaded.distance, loaded.logit_scale, loaded.logit_bias) == ("squared_l2", 1.0, 0.0)
    assert not loaded.calibrated and "a = 15.25 and b = 14.5 of samples" in loaded.kind


def test_a_checkpoint_is_ranked_by_its_match_probability(path, checkpoint, sfumato, tmp_path):
    """PCME's own way to rank, with the compressed sigmoid exp(x) / (exp(x) + exp(-x)) of its code, sample by sample."""
    random = np.random.default_rng(3)
    rows = []
    for k in range(6):
        Image.fromarray(random.integers(0, 256, (40, 40, 3), np.uint8)).save(tmp_path / f"{k}.png")
        rows.append(f"{k}.png,{' '.join(random.choice(WORDS[4:7], 3))} {k},test\n")
    (tmp_path / "own.csv").write_text("image,caption,split\n" + "".join(rows))
    (tmp_path / "own.toml").write_text(f'name = "own"\n[data]\nsource = "manifest"\npath = "{tmp_path}/own.csv"\n')
    loaded = load_pretrained(path)
    assert loaded.sampled_logits == (2 * 15.25, 2 * 14.5, 7)
    images = loaded.model.embed_images([(tmp_path / f"{k}.png").read_bytes() for k in range(6)])
    texts = loaded.model.embed_texts([row.split(",")[1] for row in rows])
    data = "--data", tmp_path / "own.toml", "--import", Path(pcme2021.__file__)
    for arguments, n, seed in (((), 7, 0), (("--samples", 3, "--seed", 5), 3, 5)):
        a = seeded_samples(images, n, seed=seed, side="image")
        b = seeded_samples(texts, n, seed=seed, side="text")
        x = torch.stack([torch.stack([14.5 - 15.25 * torch.cdist(i, t) for t in b]) for i in a]).double()
        p = (x.exp() / (x.exp() + (-x).exp())).mean((2, 3))
        found = sfumato.json("evaluate", "run", path, *data, "--distance", "match_probability", *arguments)
        assert found["distance"] == "match_probability" and found["samples"] == {"n": n, "seed": seed}
        for direction, scores in (("i2t", p), ("t2i", p.T)):
            rank = (scores > scores.diagonal()[:, None]).sum(1) + 1
            assert found[direction]["mean_rank"] == pytest.approx(float(rank.double().mean()))


def test_nothing_is_left_over_and_every_shape_is_checked(checkpoint, tmp_path):
    def load(**changes):
        torch.save(checkpoint | changes, tmp_path / "x.pth")
        return load_pretrained(tmp_path / "x.pth")

    tensors = checkpoint["model"]
    fewer = {key: value for key, value in tensors.items() if key != "txt_enc.pie_net.layer_norm.bias"}
    raises(UserError, r"1 tensors do not fit.*'txt_enc.pie_net.layer_norm.bias' is missing", load, model=fewer)
    raises(UserError, "'img_enc.other' is left over", load, model=tensors | {"img_enc.other": torch.ones(1)})
    narrow = tensors | {"img_enc.uncertain_net.fc2.weight": torch.ones(3)}
    raises(UserError, r"'img_enc.uncertain_net.fc2.weight' is \(3,\), expected \(12, 32\)", load, model=narrow)
    fewer = {key: value for key, value in tensors.items() if "conv1" not in key}
    raises(UserError, "'img_enc.cnn.conv1.weight' is missing; not a complete model of the PCME", load, model=fewer)
    criterion = checkpoint["criterion"] | {"negative_scale": torch.tensor([-1.0])}
    raises(UserError, "negative_scale is -1; a positive number", load, criterion=criterion)
    numbers = {word: i for i, word in enumerate(WORDS[:5])}
    raises(UserError, "5 words in word2idx for 11 word vectors", load, word2idx=numbers)
    numbers = {word.replace("unk", "x"): i for i, word in enumerate(WORDS)}
    raises(UserError, "word2idx has no '<unk>'", load, word2idx=numbers)
    torch.save(tensors, tmp_path / "bare.pth")
    raises(UserError, "A bare state dict has no words", load_pretrained, tmp_path / "bare.pth")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A man can't swim, isn't he?", "a man ca n't swim , is n't he ?"),
        ("He said: \"It's 3:30\" (they'll go)...", "he said : `` it 's 3:30 '' ( they 'll go ) ..."),
        ("Two dogs' bones. A cat.", "two dogs ' bones . a cat ."),
        ("1,000 t-shirts; don't!", "1,000 t-shirts ; do n't !"),
        ("cannot", "can not"),
    ],
)
def test_words_are_split_as_by_the_penn_treebank(text, words):
    expected = words.split()
    number = {word: i for i, word in enumerate(["<unk>", "<start>", "<end>", *dict.fromkeys(expected)])}
    assert pcme2021.treebank_tokenizer(number, "here").encode(text).tokens == ["<start>", *expected, "<end>"]


def test_a_padded_text_embeds_as_it_does_alone(path):
    model = load_pretrained(path).model
    ids = torch.tensor([[1, 4, 6, 2, 0, 0], [1, 4, 5, 6, 9, 2]])
    together = model.text(Inputs(ids, torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6], dtype=torch.bool)))
    alone = model.text(Inputs(ids[:1, :4], torch.ones(1, 4, dtype=torch.bool)))
    torch.testing.assert_close(together[:1].mean, alone.mean)
    torch.testing.assert_close(together[:1].log_var, alone.log_var)

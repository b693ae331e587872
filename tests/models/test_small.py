"""Models by onnxruntime, files that training resumes from and foreign checkpoints, calibration, unfamiliar inputs."""

import io
import json
import os
import re
import shutil
import time

import make_small
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from support.pictures import encoded, noise
from support.raising import raises
from support.tiny_models import assert_alike
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from sfumato import GaussianEmbedding, GaussianHead, GaussianIndex, PairData, get_distance, load_emoji
from sfumato.calibration.calibrator import Calibration, QueryScores
from sfumato.data.images import MemoryImage
from sfumato.encoders.backbones import text_backbone
from sfumato.encoders.encoder_protocol import Inputs, piece_counter
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.frozen import FrozenProcessor
from sfumato.encoders.processors import ImageFileProcessor, PixelProcessor, TokenProcessor, train_tokenizer
from sfumato.encoders.scratch import SmallImageEncoder, SmallTextEncoder
from sfumato.errors import UserError
from sfumato.evaluation.hits import measure_hits
from sfumato.metrics.bootstrap import auroc
from sfumato.models import run
from sfumato.models.build import Assets, DualEncoder, Tower, build_loss, build_model, load_state, save_state
from sfumato.models.calibrate import calibrate_split
from sfumato.models.embed import embed_folder, embedding_steps, encode_each
from sfumato.models.model import Model, UnfamiliarTexts, model_digest, nonsense
from sfumato.models.pretrained_tensors import read_checkpoint
from sfumato.models.recipe import Recipe, save_recipe
from sfumato.models.run import GRAPHS, PACKAGED, SMALL, WORDS, load_model, load_run, save_assets
from sfumato.search.answer import QueryInfo
from sfumato.workflows.export import export_run


@pytest.fixture(scope="module")
def both():
    return load_model(SMALL), load_model(SMALL, trainable=True)


def test_images_and_texts_are_embedded_as_by_torch(both):
    images = [image.read_bytes() for image in load_emoji()["val"].images[:5]]
    texts = ["a dog", "", "a red car in a street full of people " * 20, "Grüße 日本語 🦊", "?"]
    assert_alike(both[0].embed_images(images), both[1].embed_images(images))
    assert_alike(both[0].embed_texts(texts), both[1].embed_texts(texts))
    assert_alike(both[0].embed_texts(texts * 60), both[1].embed_texts(texts * 60))
    assert model_digest(both[0].model) == model_digest(both[1].model), "galleries of either are valid"
    found, expected = (one.probability(texts, images) for one in both)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("side", GRAPHS)
def test_a_head_averages_the_tokens_that_are_there(both, side):
    graph, module = (getattr(one.model, side) for one in both)
    channels, random = module.encoder.channels, np.random.default_rng(0)
    values = random.normal(2, 3, (4, 3, channels)).astype(np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    for given in (Inputs(values, mask), Inputs(values)):
        with torch.no_grad():
            assert_alike(graph.batch(given), module.batch(given))
    assert (graph.dim, graph.variances) == (module.dim, True)
    assert (graph.normalize, graph.has_offset) == (module.normalize, module.has_offset)


@pytest.mark.parametrize(("side", "name"), GRAPHS.items())
def test_the_graphs_are_those_of_the_script(side, name, tmp_path):
    weights = PACKAGED / SMALL / "model.safetensors"
    (tmp_path / weights.name).write_bytes(weights.read_bytes())
    make_small.write_head(tmp_path / name, side)
    assert (tmp_path / name).read_bytes() == (PACKAGED / SMALL / name).read_bytes()


@pytest.fixture(scope="module")
def splits():
    return load_emoji(held_out_wordings="0/5", held_out_concepts="0/10")


@pytest.fixture(scope="module")
def pieces():
    return text_backbone("minilm-l6-v2").pieces


@pytest.fixture(scope="module")
def judge(splits, pieces):
    return UnfamiliarTexts.fit(splits["train"].texts, pieces)


def test_new_words_and_made_up_ones_are_told_apart_by_the_pieces_of_the_tokenizer(judge, pieces, splits, tmp_path):
    known = set(splits["train"].texts)
    new = [text for text in splits["test"].texts if text not in known]
    made_up = nonsense(600, seed=99)
    for texts, least in ((made_up[::2], 0.97), (made_up[1::2], 0.92)):
        score = judge.score([*new, *texts], pieces)
        assert auroc(score, np.arange(len(score)) >= len(new)) > least
    assert np.mean(judge.of(new, pieces)) < 0.08 < 0.8 < np.mean(judge.of(made_up[::2], pieces))
    assert not any(judge.of(splits["train"].texts, pieces))
    assert judge.of(["", "?!", "Clock", "asdfgh qwrtzp"], pieces) == [False, False, False, True]
    judge.save(tmp_path / WORDS)
    assert UnfamiliarTexts.load(tmp_path / WORDS) == judge
    (tmp_path / WORDS).write_text(json.dumps({"weights": [1.0]}))
    raises(UserError, r"words\.json is damaged .*; delete it", UnfamiliarTexts.load, tmp_path / WORDS)
    with pytest.raises(ValueError, match="needs 100 texts with words, got 2"):
        UnfamiliarTexts.fit(["a", "b", "?"], lambda words: [1] * len(words))
    assert pieces(["dog", "giraffe", "qxzvkw"])[0] == 1 and pieces(["qxzvkw"])[0] >= 4 and pieces([]) == []
    tokenizer = train_tokenizer(["red fox", "red dog"] * 20, 60)
    own = TokenProcessor(tokenizer, 8).pieces(["red", "zebra"])
    assert own[0] == 1 < own[1]


def test_a_run_remembers_its_words_and_a_verdict_says_it_first(toy, tmp_path, judge):
    shutil.copytree(toy / "run", tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.unfamiliar is None and run.unfamiliar_texts(["qxzvkw"]) == [False]  # Fewer than 100 texts.
    judge.save(tmp_path / "run" / WORDS)
    run = load_run(tmp_path / "run")
    assert piece_counter(run.model) and run.unfamiliar_texts(["clock", "qxzvkw vvkkqx"]) == [False, True]
    loaded = load_model(tmp_path / "run")  # As searches and the service load it.
    assert loaded.unfamiliar_texts(["clock", "qxzvkw vvkkqx"]) == [False, True]
    embeddings = GaussianEmbedding(torch.zeros(3, 2), torch.zeros(3, 2))
    index = GaussianIndex.build(embeddings, ["a", "b", "c"])
    answers = index.search(embeddings[:2], 1, about=[QueryInfo("a"), QueryInfo("b", unfamiliar=True)])
    assert answers[0].verdict is None
    found = answers[1].verdict
    assert found.kind == "unfamiliar" and found.text == "The model hardly knows these words: the results are guesses"


def pair_data(n_images, n_texts, pairs):
    names = tuple(str(i) for i in range(max(n_images, n_texts)))
    images, texts = tuple(MemoryImage(name, b"") for name in names[:n_images]), names[:n_texts]
    return PairData(names[:n_images], images, texts, texts, ("caption",) * n_texts, np.array(pairs))


def scene(n_images=30, n_texts=70, d=6):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(n_images, d, generator=generator)
    of = torch.arange(n_texts) % n_images
    texts = mean[of] + 0.5 * torch.randn(n_texts, d, generator=generator)
    log_var = [torch.randn(n, d, generator=generator) - 2 for n in (n_images, n_texts)]
    pairs = [(int(i), t) for t, i in enumerate(of)] + [((int(of[t]) + 1) % n_images, t) for t in range(0, 70, 5)]
    embedded = GaussianEmbedding(mean, log_var[0]), GaussianEmbedding(texts, log_var[1])
    return embedded, pair_data(n_images, n_texts, pairs)


@pytest.mark.parametrize("distance", ["csd", "kl"])
def test_it_is_the_fit_of_all_pairs(distance):
    embedded, data = scene()
    matrix = get_distance(distance).matrix(*embedded)
    match = torch.from_numpy(data.match(np.arange(30), np.arange(70)))
    got = calibrate_split(embedded, data, distance, split="val")
    i2t, t2i = QueryScores.fit(matrix, match, growth=0.0), QueryScores.fit(matrix.T, match.T)
    whole = Calibration.fit(matrix, match, i2t=i2t, t2i=t2i)
    assert (got.logit_scale, got.logit_bias) == pytest.approx((whole.logit_scale, whole.logit_bias), rel=1e-5)
    for direction in ("i2t", "t2i"):
        a, b = got.of(direction).scores, whole.of(direction).scores
        assert (a.n_gallery, a.growth, a.matches_per_query) == (b.n_gallery, b.growth, b.matches_per_query)
        np.testing.assert_allclose(a.closest_match, b.closest_match, rtol=1e-4)
        np.testing.assert_allclose(a.closest_other, b.closest_other, rtol=1e-4)
    # Fourteen of 70 texts have two matches: half of the gallery holds 1.2 / 2 of a text's, of those that have any left.
    assert 0 < got.t2i.scores.growth < 0.3 and got.i2t.scores.growth == 0
    assert got.metadata | {"split": "val", "distance": distance, "method": "platt", "pairs": 2100} == got.metadata


def crowded(n=160, seed=0, d=8):
    """Pairs of alike images, every other far from the rest: texts of lonely pairs have two candidates, others many."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.6 * torch.randn(n, d, generator=generator)
    mean[::2] += 6 * torch.nn.functional.normalize(torch.randn(n // 2, d, generator=generator), dim=1)
    texts = mean + 0.5 * torch.randn(n, d, generator=generator)
    log_var = torch.full((n, d), -4.0)
    embedded = GaussianEmbedding(mean, log_var), GaussianEmbedding(texts, log_var)
    return embedded, pair_data(n, n, [(i, i) for i in range(n)])


def test_first_hits_have_the_stated_probability_where_the_distance_alone_errs_and_the_population_is_kept():
    embedded, data = crowded()
    fitted = calibrate_split(embedded, data, "csd", split="val")
    assert all(fit.conditional and fit.hits for fit in (fitted.i2t, fitted.t2i))
    (images, texts), n = crowded(n=1200, seed=1)[0], 1200
    distance = get_distance("csd").for_direction("t2i").matrix(texts, images)
    nearest, place = distance.topk(50, largest=False)
    right = (place[:, 0] == torch.arange(n)).double()
    given = fitted.t2i.hit_probability(nearest[:, :1], nearest, n_gallery=n)[:, 0]
    alone = fitted.t2i.probability(nearest[:, 0], n_gallery=n)
    brier = lambda p: float((p.double() - right).square().mean())
    assert brier(given) < brier(alone) - 0.02
    assert abs(float(given.double().mean() - right.mean())) < 0.1  # a gallery 7 times as large
    (images, texts) = crowded(n=160, seed=2)[0]  # What is certified holds in a gallery of the size of the fit.
    distance = get_distance("csd").for_direction("t2i").matrix(texts, images)
    nearest, place = distance.topk(50, largest=False)
    answered = ~fitted.t2i.abstains(nearest, 0.3, n_gallery=160)
    wrong = place[answered, 0] != torch.arange(160)[answered]
    assert answered.sum() > 50 and float(wrong.double().mean()) < 0.4
    both = {p: calibrate_split(embedded, data, "csd", split="val", population=p) for p in ("planted", "independent")}
    assert all(c.metadata["queries"] == p and c.t2i.conditional.population == p for p, c in both.items())
    distance = get_distance("csd").for_direction("t2i").matrix(embedded[1], embedded[0])[:, :80]
    nearest = distance.topk(50, largest=False).values
    p = {name: float(c.t2i.hit_probability(nearest[:, :1], nearest, n_gallery=80).mean()) for name, c in both.items()}
    assert p["independent"] < p["planted"]


def test_of_a_large_split_a_part_is_taken_and_images_without_a_text_do_not_stop_it():
    embedded, data = scene()
    got = calibrate_split(embedded, data, "csd", split="val", max_pairs=840, max_queries=25)
    assert got.metadata["pairs"] == 12 * 70
    assert (len(got.i2t.scores.nearest), got.i2t.scores.n_gallery) == (25, 70)
    assert (len(got.t2i.scores.nearest), got.t2i.scores.n_gallery) == (25, 30)
    again, other = (
        calibrate_split(embedded, data, "csd", split="val", max_pairs=840, max_queries=25, seed=seed) for seed in (0, 1)
    )
    assert got == again != other
    assert set(got.metadata["set_sizes"]) == {"i2t", "t2i"}
    few = data.pairs[data.pairs[:, 0] < 4]
    shared = PairData(data.image_ids, data.images, data.text_ids, data.texts, data.text_kinds, few)
    fitted = calibrate_split(embedded, shared, "csd", split="val")
    assert fitted.i2t.scores.matches_per_query > 0 and fitted.t2i.scores.n_gallery == 30
    fitted = calibrate_split(embedded, data, "csd", split="val")
    assert all(fit.conditional is fit.hits is None for fit in (fitted.i2t, fitted.t2i))
    distance = torch.tensor([[0.5, 1.0]])
    expected = fitted.t2i.probability(distance, n_gallery=9)
    assert torch.equal(fitted.t2i.hit_probability(distance, distance, n_gallery=9), expected)


def with_hubs(n, seed, d=24, n_hubs=20):
    generator = torch.Generator().manual_seed(seed)
    unit = lambda *shape: torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=1)
    hubs = unit(n_hubs, d) * 0.4
    images = torch.cat([hubs, unit(n, d)])
    texts = torch.nn.functional.normalize(images[n_hubs:] + 0.3 * torch.randn(n, d, generator=generator), dim=1)
    images, texts, training = (GaussianEmbedding.point(mean) for mean in (images, texts, unit(800, d)))
    return (images, texts), pair_data(n + n_hubs, n, [(k + n_hubs, k) for k in range(n)]), training


def test_reference_queries_tell_hubs_from_matches_and_too_few_are_left_out():
    embedded, data, training = with_hubs(500, 0)
    plain = calibrate_split(embedded, data, "squared_l2", split="val")
    seen = calibrate_split(embedded, data, "squared_l2", split="val", reference=(training, training))
    assert seen.t2i.reference and not plain.tensors()
    (images, texts), new, _ = with_hubs(500, 1)
    distance = get_distance("squared_l2").matrix(images, texts)
    match = torch.from_numpy(new.match(np.arange(images.n), np.arange(texts.n)))
    losses = {}
    for name, calibration in (("plain", plain), ("seen", seen)):
        figures = measure_hits(calibration, distance, match, embedded=(images, texts), sizes=())
        losses[name] = next(f.log_loss for f in figures if f.direction == "t2i" and f.hits == 1)
    assert losses["seen"] < losses["plain"] - 0.02
    raises(ValueError, "embedded", measure_hits, seen, distance, match, sizes=())
    embedded, data, training = with_hubs(120, 2)
    few = training[:150]
    assert not calibrate_split(embedded, data, "squared_l2", split="val", reference=(few, few)).tensors()


def tiny_model(seed=0, processor=None):
    torch.manual_seed(seed)
    image, text = SmallImageEncoder(4), SmallTextEncoder(2, 8, 0.0)
    tokens = TokenProcessor(Tokenizer(WordLevel({"[UNK]": 0, "red": 1}, unk_token="[UNK]")), 5)
    sides = (processor or PixelProcessor(16), image), (tokens, text)
    return DualEncoder(*(Tower(read, one, GaussianHead(one.channels, 7)) for read, one in sides)).eval()


numbered = lambda number, size=(21, 17): encoded(noise(*size, seed=number))


def test_the_digest_of_a_model_is_of_what_it_computes():
    model = tiny_model()
    digest = model_digest(model)
    assert digest == model_digest(tiny_model()) == model_digest(model.train())
    assert digest == model_digest(tiny_model(processor=PixelProcessor(16)))
    changes = {"seed": 1}, {"processor": PixelProcessor(17)}, {"processor": PixelProcessor(16, fit="crop")}
    assert digest not in [model_digest(tiny_model(**change)) for change in changes]
    model.image.head.normalize = False
    assert digest != model_digest(model)
    one, two = (tiny_model(processor=ImageFileProcessor(16)) for _ in range(2))
    assert model_digest(one) == model_digest(two) != digest


def test_an_item_that_spoils_its_batch_or_has_no_embedding_is_left_out():
    model, told, refused = tiny_model(), {}, []
    prepare, encode = embedding_steps(model.image, "images")
    values = [prepare(numbered(k)) for k in range(5)]
    forward = model.image.forward

    def spoilt(inputs):
        embedding = forward(inputs)
        for row, pixels in enumerate(inputs.values):
            if pixels.equal(torch.from_numpy(values[1])):
                refused.append(len(inputs))
                raise ValueError("a strange shape")
            if pixels.equal(torch.from_numpy(values[3])):
                embedding.mean[row, 0] = torch.nan
        return embedding

    model.image.forward = spoilt
    kept, rows = encode_each(encode, list(enumerate(values)), lambda k, error: told.update({k: str(error)}))
    assert refused == [5, 1], "in its batch, and alone"
    assert told == {1: "a strange shape", 3: "its embedding holds NaN or infinity"} and kept == [0, 2, 4]
    model.image.forward = forward
    torch.testing.assert_close(torch.cat([row.mean for row in rows]), encode([values[k] for k in kept]).mean)
    assert encode_each(encode, [], told.update) == ([], [])


class Colours:
    channels, fingerprint = 3, "colours"

    def __call__(self, items):
        pictures = [np.asarray(Image.open(io.BytesIO(item)).convert("RGB"), np.float32) for item in items]
        return [p[:1, : p.shape[1] // 10].reshape(-1, 3).astype(np.float16) / 255 for p in pictures]


def test_batches_of_frozen_backbones_use_no_cache_and_give_what_a_folder_gives(tmp_path):
    for k, width in enumerate((20, 60, 30)):
        (tmp_path / f"{k}.png").write_bytes(numbered(k, (width, 20)))
    tower = Tower(FrozenProcessor(Colours(), tmp_path / "cache"), FeatureInput(3, 0.0), GaussianHead(3, 7))
    model = DualEncoder(tower, tiny_model().text).eval()
    prepare, encode = embedding_steps(tower, "images")
    found = encode([prepare((tmp_path / f"{k}.png").read_bytes()) for k in range(3)])
    assert not (tmp_path / "cache").exists()
    expected, ids, _ = embed_folder(Model(model=model, distance="csd", logit_scale=1.0, logit_bias=0.0), tmp_path)
    assert ids == ["0.png", "1.png", "2.png"]
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-6)


def test_names_that_are_no_ids_are_left_out_of_a_folder(tmp_path):
    for name in ("fine.png", "two\nlines.png", "tab\t.png"):
        (tmp_path / name).write_bytes(numbered(3))
    (tmp_path / "link.png").symlink_to(tmp_path / "fine.png")
    try:
        (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(numbered(3))
    except OSError:
        pytest.skip("this file system takes only Unicode")
    model = Model(model=tiny_model(), distance="csd", logit_scale=1.0, logit_bias=0.0)
    _, ids, problems = embed_folder(model, tmp_path)
    assert ids == ["fine.png", "link.png"]
    said = {p.reason.partition(" holds ")[0].partition(" (")[0] for p in problems.items}
    assert said == {r"the id 'two\nlines.png'", r"the id 'tab\t.png'", r"the id '\udcff.png' is not Unicode"}


def fresh():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def change(path, drop=(), **note):
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys() if name not in drop}  # noqa: SIM118
    save_file(tensors, path, {"state": json.dumps({**state, **note})})


def test_what_was_saved_comes_back_and_what_does_not_fit_is_named(tmp_path):
    path, (model, optimiser) = tmp_path / "last.safetensors", fresh()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    save_state(path, {"m": model}, optimiser, {"epoch": 4})
    change(path)  # The change itself is harmless.
    whole, (again, other) = path.read_bytes(), fresh()
    assert load_state(path, {"m": again}, other) == {"epoch": 4}
    assert torch.equal(again.weight, model.weight)
    torch.testing.assert_close(other.state_dict()["state"], optimiser.state_dict()["state"])
    for changes, message in (
        ({"drop": ("m/bias",)}, "does not fit the m of this recipe: tensor 'bias' differs"),
        *((made, "damaged, or not a checkpoint of sfumato") for made in ({"about": 3}, {"optimiser": [1]})),
        *(({"optimiser": {key: 1.0}}, "the state of the optimiser is damaged") for key in ("a/step", "step")),
        ({"drop": ("optimiser/0/step",)}, "the state of the optimiser is damaged"),
    ):  # fmt: skip
        path.write_bytes(whole)
        change(path, **changes)
        again, other = fresh()
        raises(UserError, message, load_state, path, {"m": again}, other)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    encoders = {"image": {"kind": "small", "size": 16, "width": 4}, "text": {"kind": "small", "width": 16}}
    recipe = Recipe.model_validate({"name": "untrained", "model": {"dim": 8, **encoders}})
    tokenizer = train_tokenizer(["a red bird", "a blue fish"], 60)
    model = build_model(recipe.model, Assets(tokenizer, {}))
    (folder / "run").mkdir()
    save_recipe(recipe, folder / "run" / run.RECIPE)
    save_assets(folder / "run", tokenizer, model)
    save_state(folder / "run" / run.MODEL, {"model": model, "loss": build_loss(recipe)}, None, {"epoch": 1})
    export_run(folder / "run", folder / "exported")
    return folder


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_weights_of_another_width_and_ids_beyond_the_tokenizer_are_refused(kind, untrained, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(untrained / kind, folder)
    load_model(folder)
    path, width = (folder / "recipe.toml", "width = 16") if kind == "run" else (folder / "config.json", '"width": 16')
    text = path.read_text()
    assert text.count(width) == 1
    path.write_text(text.replace(width, width.replace("16", "25666")))  # 8 GB of random numbers.
    began = time.process_time()
    what = "the model of this recipe" if kind == "run" else "its config.json"
    raises(UserError, rf"does not fit {what}: .*text.*differs, and \d+ more", load_model, folder)
    assert time.process_time() - began < 2, "before the model is made"
    path.write_text(text)
    tokenizer = json.loads((folder / run.TOKENIZER).read_text())
    tokenizer["model"]["vocab"]["fish"] = 4441
    (folder / run.TOKENIZER).write_text(json.dumps(tokenizer))
    raises(UserError, r"the tokenizer is damaged: of its \d+ tokens, 'fish' has the id 4441", load_model, folder)


def test_tensors_settings_and_formats(tmp_path):
    state = {"weight": torch.arange(4.0)}
    save_file(state, tmp_path / "new.safetensors")
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("new.safetensors", "zip.pt", "old.pth"):
        assert torch.equal(read_checkpoint(tmp_path / name)["weight"], state["weight"])
    values = {
        "float64": np.float64(0.1), "float32": np.float32(0.5), "int64": np.int64(-7), "bool": np.bool_(True),
        "swapped": np.array(3, dtype=">i4")[()],
    }  # fmt: skip
    torch.save({"metadata": values}, tmp_path / "pcme.pth")
    metadata = read_checkpoint(tmp_path / "pcme.pth")["metadata"]
    assert metadata == {key: value.item() for key, value in values.items()}
    assert {type(value) for value in metadata.values()} == {float, int, bool}


class Trap:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_does_not_run(zipped, tmp_path):
    target = tmp_path / "made-by-the-pickle"
    trap = {"state_dict": {"a": torch.ones(1)}, "trap": Trap(str(target))}
    torch.save(trap, tmp_path / "trap.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"trap.pt: holds a (posix|nt).mkdir, and reading that would run code"):
        read_checkpoint(tmp_path / "trap.pt")
    assert not target.exists()


class Own:
    pass


def test_damaged_files_files_of_something_else_and_foreign_classes(tmp_path):
    raises(UserError, "there is no checkpoint", read_checkpoint, tmp_path / "missing.pt")
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in (
        ("cut.pt", whole[:-700]), ("empty.pt", b""), ("text.pt", b"hello world, this is no checkpoint"),
        ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        raises(UserError, f"{name}: damaged, or not a checkpoint", read_checkpoint, tmp_path / name)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    old = (tmp_path / "old.pt").read_bytes()
    key = re.findall(rb"\d{6,}", old)[-1]  # Of the storage: once in the description of the tensor, once in a list.
    at = old.rindex(key)
    (tmp_path / "old.pt").write_bytes(old[:at] + key[::-1] + old[at + len(key) :])
    raises(UserError, r"old\.pt: damaged, or not a checkpoint", read_checkpoint, tmp_path / "old.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    raises(UserError, "holds a list, expected a dictionary", read_checkpoint, tmp_path / "list.pt")
    torch.save({"model": Own()}, tmp_path / "module.pt")
    raises(UserError, r"holds a .*test_small.Own.*save only its state dict", read_checkpoint, tmp_path / "module.pt")

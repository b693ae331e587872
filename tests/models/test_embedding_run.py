"""A run on embeddings: trained, opened without its data, and taken by every command, as a user would."""

import csv
import json

import numpy as np
import pytest
import torch
from support.serving import served

from sfumato.distances import get_distance
from sfumato.encoders.encoder_protocol import Inputs
from sfumato.errors import UserError
from sfumato.models.recipe import find_recipe, load_recipe
from sfumato.models.run import load_model, load_run
from sfumato.serve.settings import open_sources
from sfumato.training.loop import fit

N, PER_IMAGE = 80, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of 6 and texts of 5 channels that are linear maps of one hidden vector; two texts an image."""
    folder = tmp_path_factory.mktemp("embeddings")
    random = np.random.default_rng(0)
    hidden = random.standard_normal((N, 4))
    images = hidden @ random.standard_normal((4, 6)) + 3
    texts = np.repeat(hidden, PER_IMAGE, axis=0) @ random.standard_normal((4, 5)) - 2
    texts[7] = np.nan
    np.save(folder / "images.npy", images.astype(np.float16))
    np.save(folder / "texts.npy", texts.astype(np.float32))
    np.save(folder / "images_ids.npy", np.array([f"photo-{i}" for i in range(N)]))
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "text", "split"])
        for text in range(N * PER_IMAGE):
            image = text // PER_IMAGE
            writer.writerow([f"photo-{image}", text, "train" if image < 32 else ("val", "test")[image % 2]])
    np.save(folder / "query.npy", texts[2 * 33])
    return folder


SMALL = "model.dim=8", "model.hidden=16", "train.batch_size=16", "train.epochs=40", "optim.lr=1e-2", "train.device=cpu"


@pytest.fixture(scope="module")
def run(folder):
    files = {"images": "images.npy", "texts": "texts.npy", "path": "pairs.csv"}
    data = [f"data.{key}={folder / name}" for key, name in files.items()]
    fit(load_recipe(find_recipe("embeddings"), [*SMALL, *data]), folder / "run")
    return folder / "run"


def inputs(row):
    return Inputs(torch.from_numpy(row).view(1, 1, -1))


@pytest.mark.slow
def test_training_leaves_out_the_bad_row_and_learns(folder, run):
    (problem,) = map(json.loads, (run / "problems.jsonl").read_text().splitlines())
    assert problem == {"place": f"{folder / 'texts.npy'}[7]", "reason": "text '7' holds NaN or infinity"}
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] / 2


def test_a_run_starts_from_another_and_is_anchored_to_it(folder, run):
    """The training is the same with any anchor: what is kept lies on the line from the start to its average."""
    recipe = load_recipe(run / "recipe.toml", [f"train.start={run}", "train.epochs=2", "train.seed=5"])
    kept = {}
    for anchor in (0, 0.75):
        config = recipe.train.model_copy(update={"anchor": anchor, "ema_decay": 0.9, "select": "last"})
        fit(recipe.model_copy(update={"train": config}), folder / f"anchor-{anchor}")
        kept[anchor] = load_run(folder / f"anchor-{anchor}").model.state_dict()
    moved = 0.0
    for name, start in load_run(run).model.state_dict().items():
        torch.testing.assert_close(kept[0.75][name], start.lerp(kept[0][name], 0.25))
        moved += (kept[0][name] - start).abs().sum().item()
    assert moved > 1
    wrong = load_recipe(run / "recipe.toml", [f"train.start={run}", "model.dim=4"])
    with pytest.raises(UserError, match=r"train.start=.*does not fit the model of this recipe.*train.start= train.anc"):
        fit(wrong, folder / "wrong")
    with pytest.raises(UserError, match=r"train.anchor=0.5 mixes averaged weights with those of train.start"):
        load_recipe(run / "recipe.toml", ["train.anchor=0.5", "train.ema_decay=0.9"])


def test_a_run_opens_without_its_data(folder, run, sfumato):
    described = json.loads((run / "encoders.json").read_text())
    assert described == {"image": {"channels": 6}, "text": {"channels": 5}}
    moved = folder / "images.npy", folder / "elsewhere.npy"
    moved[0].rename(moved[1])
    try:
        assert load_run(run).model.image.processor.channels == 6
        status, _, err = sfumato("evaluate", "run", run)
        assert status == 2 and "images.npy" in err and "no embeddings at" in err
    finally:
        moved[1].rename(moved[0])


def test_evaluate_calibrate_and_the_other_commands(folder, run, sfumato):
    status, out, err = sfumato("evaluate", "run", run, "--json")
    assert status == 0, err
    images, texts = np.load(folder / "images.npy").astype(np.float32), np.load(folder / "texts.npy")
    model = load_run(run).model
    chosen = [i for i in range(32, N) if i % 2]
    own = [t for i in chosen for t in (2 * i, 2 * i + 1)]
    with torch.no_grad():
        a, b = (
            torch.stack([tower.head(tower.encoder(inputs(row))).mean[0] for row in rows])
            for tower, rows in ((model.image, images[chosen]), (model.text, texts[own]))
        )
    first = torch.cdist(b, a).argmin(1).tolist()
    hits = np.mean([k == text // 2 for text, k in enumerate(first)])
    assert json.loads(out)["t2i"]["recall@1"] == pytest.approx(hits) and hits > 1 / len(chosen)
    for command in (
        ("calibrate", run),
        ("trust", run),
        ("report", run),
        ("audit", run, "--split", "test"),
        ("export", run, folder / "exported"),
    ):
        status, out, err = sfumato(*command)
        assert status == 0, (command, err)
    exported = load_model(folder / "exported")
    query = (folder / "query.npy").read_bytes()
    assert torch.equal(exported.model.embed_texts([query]).mean, model.embed_texts([query]).mean)


def test_index_and_search(folder, run, sfumato, tmp_path):
    index = tmp_path / "index"
    status, _, err = sfumato("index", run, "--split", "test", "--out", index)
    assert status == 0, err
    status, out, err = sfumato("search", index, "--id", "photo-33", "--id", "photo-35", "-k", "3", "--json")
    assert status == 0, err
    first, second = json.loads(out)
    assert first["hits"][0]["id"] == "photo-33" and second["hits"][0]["id"] == "photo-35"
    assert first["hits"][0]["distance"] == pytest.approx(0, abs=1e-5) and first["calibrated"] is False
    status, out, err = sfumato("search", index, folder / "query.npy", "-k", "2", "--duplicates", "show", "--json")
    assert status == 0, err
    model = load_run(run).model
    query = model.embed_texts([(folder / "query.npy").read_bytes()])
    images = np.load(folder / "images.npy").astype(np.float32)
    with torch.no_grad():
        rows = {i: model.image.head(model.image.encoder(inputs(images[i]))) for i in range(33, N, 2)}
    distance = {i: get_distance("squared_l2").matrix(query, row).item() for i, row in rows.items()}
    nearest = sorted(distance, key=distance.__getitem__)[:2]
    assert [hit["id"] for hit in json.loads(out)[0]["hits"]] == [f"photo-{i}" for i in nearest]


def test_the_service_searches_by_item_and_refuses_texts(run, sfumato, tmp_path):
    sfumato.printed("index", run, "--split", "test", "--out", tmp_path / "index")
    with served(open_sources(tmp_path / "index")) as client:
        found = client.post("/v1/search", json={"queries": [{"id": "photo-33"}]})
        assert found.status_code == 200, found.text
        assert found.json()["answers"][0]["hits"][0]["id"] == "photo-33"
        refused = client.get("/v1/search", params={"q": "a dog"})
        assert refused.status_code == 422
        assert "the model of this service reads embeddings, not texts; search by vector or by item" in refused.text

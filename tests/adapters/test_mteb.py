"""Models in tasks of MTEB, on the real package (2.26.24), in an environment of its own:
env/bin/pip install -c constraints.txt -e '.[mteb]' pytest hypothesis"""

import numpy as np
import pytest
import torch

pytest.importorskip("mteb", reason="mteb is not installed")
import mteb
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from PIL import Image
from support.raising import raises

import sfumato
from sfumato.adapters.mteb import MTEBEncoder
from sfumato.errors import UserError


def metadata(category, modalities):
    return TaskMetadata(
        name=f"Toy{category}", dataset={"path": "none", "revision": "1"}, description="Images and captions",
        type="Any2AnyRetrieval", modalities=modalities, category=category, eval_splits=["test"],
        eval_langs=["eng-Latn"], main_score="ndcg_at_10",
    )  # fmt: skip


class Toy(AbsTaskRetrieval):
    """A split of images and captions as a task; ``given`` is (images, texts, pairs)."""

    metadata = metadata("t2i", ["text", "image"])
    given = None

    def load_data(self, **_):
        images, texts, pairs = self.given
        of_images = Dataset.from_dict({"id": [f"i{i}" for i in range(len(images))], "image": images})
        of_texts = Dataset.from_dict({"id": [f"t{i}" for i in range(len(texts))], "text": list(texts)})
        listed = {f"t{t}": {} for t in range(len(texts))}
        for i, t in pairs:
            listed[f"t{t}"][f"i{i}"] = 1
        split = {"queries": of_texts, "corpus": of_images, "relevant_docs": listed, "top_ranked": None}
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


@pytest.fixture(scope="module")
def loaded(toy):
    """A model with variances, its images and texts, and the distances of each text to each image."""
    model = sfumato.load(toy / "run")
    data = sfumato.read_image_folder(toy / "data", sfumato.Problems(), val_fraction=0, test_fraction=0)["train"]
    images = [Image.open(source.path).convert("RGB") for source in data.images]
    distance = model.ranking_distance().matrix(model.embed_texts(data.texts), model.embed_images(images))
    return model, images, data, distance


def test_a_task_ranks_by_the_distance_vectors_have_variances_and_what_it_cannot_do_is_said(loaded, tmp_path):
    model, images, data, distance = loaded
    task = Toy()
    task.given = images, data.texts, data.pairs.tolist()
    found = mteb.evaluate(MTEBEncoder(model), task, cache=None, show_progress_bar=False, prediction_folder=tmp_path)
    scores = found.task_results[0].scores["test"][0]
    match = torch.from_numpy(data.match(np.arange(len(images)), np.arange(len(data.texts)))).T
    first = match[torch.arange(len(match)), distance.argmin(1)]
    assert 0 < float(first.mean()) < 1 and scores["hit_rate_at_1"] == pytest.approx(float(first.mean()), abs=1e-5)
    gain = (torch.gather(match, 1, distance.argsort(1)[:, :10]) / torch.log2(torch.arange(2, 12.0))).sum(1)
    ideal = torch.stack([(1 / torch.log2(torch.arange(2, 12.0)))[: int(n)].sum() for n in match.sum(1)])
    assert scores["ndcg_at_10"] == pytest.approx(float((gain / ideal).mean()), abs=1e-5)
    encoder = MTEBEncoder(model, "me/mine")
    texts = encoder.encode([{"text": list(data.texts[:3])}, {"text": list(data.texts[3:5])}])
    expected = model.embed_texts(data.texts[:5])
    torch.testing.assert_close(texts, torch.cat([expected.mean, expected.log_var.exp()], 1), atol=1e-6, rtol=1e-5)
    pixels = encoder.encode([{"image": images[:4]}], task_metadata=None, show_progress_bar=True)
    torch.testing.assert_close(encoder.similarity(texts.numpy(), pixels), -distance[:5, :4], atol=1e-5, rtol=1e-5)
    own = encoder.similarity_pairwise(texts[:4], pixels)
    torch.testing.assert_close(own, -distance[:4, :4].diagonal(), atol=1e-5, rtol=1e-5)
    meta = encoder.mteb_model_meta
    assert (meta.name, meta.embed_dim) == ("me/mine", texts.shape[1]) and len(meta.revision) == 16
    assert MTEBEncoder(model).mteb_model_meta.name == "sfumato/run"
    assert not torch.allclose(MTEBEncoder(model, distance="squared_l2").similarity(texts, pixels), -distance[:5, :4])
    with pytest.raises(UserError, match="have text, image; expected an image or a text"):
        MTEBEncoder(model).encode([{"text": ["a"], "image": images[:1]}])
    raises(UserError, "the distance kl is not symmetric", MTEBEncoder, model, distance="kl")

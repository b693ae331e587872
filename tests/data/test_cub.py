"""CUB Captions on a tiny folder of its shape: splits against set arithmetic, labels against loops over classes."""

import numpy as np
import pytest
from PIL import Image

from sfumato.data.images import Problems
from sfumato.data.layouts import CubOptions, read_cub
from sfumato.data.pairs import PairSampler
from sfumato.evaluation.benchmark_ground_truths import cub_captions

BIRDS = [f"{k:03d}.Bird_{letter}" for k, letter in enumerate("abcdef", 1)]
LISTS = {
    "trainvalclasses": [3, 0, 1, 2],
    "testclasses": [5, 4],
    **{f"trainclasses{k}": [c for c in range(4) if c != k] for k in (1, 2, 3)},
    **{f"valclasses{k}": [k] for k in (1, 2, 3)},
}
SEEN = ["001.Bird_a/a1.jpg", "003.Bird_c/c0.jpg", "006.Bird_f/f2.jpg"]


@pytest.fixture
def cub(tmp_path):
    for c, bird in enumerate(BIRDS):
        for folder in ("images", "text_c10"):
            (tmp_path / folder / bird).mkdir(parents=True)
        for k in range(3):
            name = f"{bird[-1]}{k}"
            Image.new("RGB", (20, 16), (40 * c, 80 * k, 100)).save(tmp_path / "images" / bird / f"{name}.jpg")
            lines = [f"bird {bird[-1]} number {k}", "this bird has wings", *([f"the {k} of {c}"] if k else [])]
            (tmp_path / "text_c10" / bird / f"{name}.txt").write_text("\n".join(lines) + "\n\n")
            (tmp_path / "text_c10" / bird / f"{name}.t7").write_bytes(b"other files are ignored")
    (tmp_path / "splits").mkdir()
    for name, classes in LISTS.items():
        (tmp_path / "splits" / f"{name}.txt").write_text("".join(f"{BIRDS[c]}\n" for c in classes))
    (tmp_path / "splits" / "seen_test_images.txt").write_text("\n".join(SEEN))
    return tmp_path


def read(folder, **options):
    problems = Problems()
    splits = read_cub(folder, problems, CubOptions(**options))
    assert not len(problems)
    return splits


images_of = lambda classes: {f"{BIRDS[c]}/{BIRDS[c][-1]}{k}.jpg" for c in classes for k in range(3)}


@pytest.mark.parametrize("fold", [0, 2])
def test_splits_are_those_of_the_benchmark(cub, fold):
    splits = read(cub, fold=fold)
    train = LISTS["trainvalclasses" if fold == 0 else f"trainclasses{fold}"]
    expected = {"train": images_of(train) - set(SEEN), "test": images_of([4, 5])}
    expected["seen"] = images_of(train) & set(SEEN)
    if fold:
        expected["val"] = images_of([fold])
    assert {name: set(data.image_ids) for name, data in splits.items()} == expected


def test_images_and_captions_of_a_class_match_as_in_the_benchmark(cub):
    of = lambda identity: identity.split("/")[0]
    for data in read(cub).values():
        match = data.match(np.arange(len(data.image_ids)), np.arange(len(data.text_ids)))
        assert match.tolist() == [[of(image) == of(text) for text in data.text_ids] for image in data.image_ids]
        same = [[of(a) == of(b) for b in data.image_ids] for a in data.image_ids]
        assert ((data.groups[:, None] == data.groups) == same).all()
    data = read(cub)["test"]
    truth = cub_captions(cub / "text_c10", classes=cub / "splits" / "testclasses.txt")
    assert (data.image_ids, data.text_ids) == (truth.image_ids, truth.text_ids)
    ours = data.relevance()
    assert ours.indices.tolist() == truth.i2t.indices.tolist() and ours.indptr.tolist() == truth.i2t.indptr.tolist()
    splits = read_cub(cub, Problems(), CubOptions(classes=(BIRDS[5], BIRDS[0])), val_fraction=0.3, test_fraction=0.3)
    assert set().union(*(data.image_ids for data in splits.values())) == images_of([0, 5])
    assert set(splits) <= {"train", "val", "test"} and len(splits) > 1
    again = read_cub(cub, Problems(), CubOptions(classes=(BIRDS[0],)), val_fraction=0.3, test_fraction=0.3)
    for name, data in again.items():
        assert set(data.image_ids) == set(splits[name].image_ids) & images_of([0])


def test_own_pairs_are_for_training_only_and_a_batch_has_one_of_each_class(cub):
    splits = read(cub, train_pairs="own")
    train = splits["train"]
    assert all(train.text_ids[t].startswith(f"{train.image_ids[i]}#") for i, t in train.pairs)
    assert len(train.pairs) == len(train.text_ids)
    assert splits["test"].pairs.tolist() == read(cub)["test"].pairs.tolist()
    sampler = PairSampler(train, 150, 0, epoch_over="groups", positives="sampled")
    batches = [batch for epoch in range(20) for batch in sampler.batches(epoch)]
    assert len(sampler) == len(train.text_ids) // 4 == len(batches) / 20
    for batch in batches:
        assert sorted(train.groups[batch.image_index]) == sorted(set(train.groups.tolist()))
        assert (batch.match == np.eye(4)).all()
    assert {i for batch in batches for i in batch.image_index.tolist()} == set(range(len(train.image_ids)))
    smaller = PairSampler(train, 3, 0, epoch_over="groups", positives="sampled")
    assert all(len(set(train.groups[batch.image_index].tolist())) == 3 for batch in smaller.batches(0))
    assert len({tuple(sorted(train.groups[b.image_index])) for b in smaller.batches(0)}) > 1

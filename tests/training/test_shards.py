"""Training from a stream of shards."""

import json

import pytest
from support.pictures import write_tar
from support.toy import assert_same_runs, fit_until, log_of, make_toy

from sfumato import Problems, fit, load_recipe
from sfumato.data.shards import ShardBatch
from sfumato.models.embed import load_splits
from sfumato.models.process_group import alone
from sfumato.models.run import load_run
from sfumato.training.batches import Augmentation, ShardBatches


def write_shards(split, folder, per_shard=20):
    folder.mkdir()
    for start in range(0, len(split.pairs), per_shard):
        members = []
        for number, (image, text) in enumerate(split.pairs[start : start + per_shard].tolist(), start):
            members.append((f"{number:09d}.png", split.images[image].read_bytes()))
            members.append((f"{number:09d}.txt", split.texts[text].encode()))
        write_tar(folder / f"{start:05d}.tar", members)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    recipe = make_toy(folder)
    splits = load_splits(load_recipe(recipe).data, Problems())
    for name in ("train", "val"):
        write_shards(splits[name], folder / name)
    stream = ["data.source=shards", f"data.path={folder}/train/*.tar", f"data.val_path={folder}/val"]
    return recipe, [*stream, "data.samples_per_epoch=192"], splits


@pytest.fixture(scope="module")
def trained(toy):
    recipe, stream, _ = toy
    return recipe.parent / "run", fit(load_recipe(recipe, stream), recipe.parent / "run")


@pytest.mark.slow
def test_a_stream_trains_validates_and_resumes(trained):
    folder, result = trained
    lines = log_of(folder)
    assert result["best_score"] > 0 and lines[-1]["loss/match"] < lines[0]["loss/match"]
    assert load_run(folder).calibrated
    assert load_run(folder).model.text.processor.tokenizer.token_to_id("circle") is not None


@pytest.mark.parametrize(("equal_texts", "matches"), [("merged", 4 + 2), ("separate", 4)])
def test_captions_of_a_stream_are_equal_whatever_their_case_unless_they_are_kept_separate(
    toy, trained, equal_texts, matches
):
    recipe, _, splits = toy
    model = load_run(trained[0]).model
    pictures = [image.read_bytes() for image in splits["train"].images[:4]]

    class Stream:
        def batches(self, epoch):
            yield ShardBatch(list("abcd"), pictures, ["A red  dog", "a red dog", "a red dog.", "red"])

    augmentation = Augmentation(load_recipe(recipe), model, alone())
    (batch,) = ShardBatches(Stream(), model, augmentation, alone(), equal_texts=equal_texts).epoch(0)
    assert batch.labels(alone())[0].sum() == matches


@pytest.mark.slow
def test_what_a_stream_leaves_out_is_listed_with_the_run(toy, tmp_path):
    recipe, stream, splits = toy
    write_shards(splits["train"], tmp_path / "data")
    more = ("1.jpg", b"no picture"), ("1.txt", b"a red circle"), ("2.txt", b"no picture at all")
    write_tar(tmp_path / "data" / "more.tar", more)
    result = fit(load_recipe(recipe, [*stream, f"data.path={tmp_path}/data/*.tar", "train.epochs=1"]), tmp_path / "run")
    listed = [json.loads(line)["place"] for line in (tmp_path / "run" / "problems.jsonl").read_text().splitlines()]
    assert result["problems"] == len(listed) and {place.rpartition("!")[2] for place in listed} == {"1", "2"}
    # Also by a run that was interrupted and does not decode again what it had done.
    overrides = [*stream, f"data.path={tmp_path}/data/*.tar", "train.epochs=1", "train.save_minutes=1e-9"]
    fit_until(load_recipe(recipe, overrides), tmp_path / "parts", lambda about: about["part"]["step"] == 23)
    assert fit(load_recipe(recipe, overrides), tmp_path / "parts")["problems"] == len(listed)
    assert (tmp_path / "parts" / "problems.jsonl").read_text() == (tmp_path / "run" / "problems.jsonl").read_text()
    assert_same_runs(tmp_path / "run", tmp_path / "parts")

"""Several processes are one, also on shards: the same losses, gradients and runs, and an end when one dies."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pictures import write_tar
from support.processes import command, process_group
from support.raising import raises
from support.toy import assert_same_runs, fit_until, log_of, make_toy
from torch.nn import functional
from training.test_step import batch as pairs
from training.test_step import build

from sfumato import LOSSES, Problems, fit, get_distance, load_recipe, register_loss
from sfumato.data.shards import ShardSample
from sfumato.losses.pcme import PCMEOptions
from sfumato.losses.pcmepp import PCMEPPOptions
from sfumato.models.embed import load_splits
from sfumato.models.process_group import PeerLostError, ProcessGroup, _answered, alone, join_process_group
from sfumato.models.run import load_run
from sfumato.training.batches import Augmentation, ShardBatches
from sfumato.training.step import forward_backward


def succeed(size, function, *arguments):
    everything = []
    for process in process_group(size, function, *arguments):
        status, said = process.finish()
        assert status == 0, said
        everything.append(said)
    return everything


SIZES = [8, 7, 3, 2]  # Uneven parts, and fewer pairs than processes.
HALF = ["model.image.augment=false", "model.text.dropout=0", "train.epochs=12", "train.timeout_minutes=1"]
HALF += ["train.precision=float16", "train.ema_decay=0.9"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    out = tmp_path_factory.mktemp("worlds")
    gradients_of_losses(out, SIZES)
    LOSSES.pop("plain")
    succeed(3, gradients_of_losses, out, SIZES)
    read = lambda name: (json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors"))
    return {size: [read(f"{size}-{rank}") for rank in range(size)] for size in (1, 3)}


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process_and_agree_to_the_bit(worlds):
    expected_values, expected = worlds[1][0]
    for values, gradients in worlds[3]:
        assert values.keys() == expected_values.keys()
        for case, expected_value in expected_values.items():
            assert values[case] == pytest.approx(expected_value, rel=1e-9, abs=1e-12), case
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-9)
    for loss in (*LOSSES, "plain"):
        assert max(g.abs().max() for name, g in expected.items() if name.startswith(loss)) > 1e-4, loss
    first = worlds[3][0][1]
    assert all(torch.equal(g[name], first[name]) for _, g in worlds[3] for name in first)


def test_parts_cover_everything_once_and_a_lost_process_is_told_from_memory_that_ran_out():
    for n in (0, 1, 3, 10):
        parts = [ProcessGroup(rank, 4, torch.device("cpu")).part(n) for rank in range(4)]
        assert [int(i) for part in parts for i in part] == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert alone().main and alone().part(3).tolist() == [0, 1, 2]

    def fail(error):
        raise error

    raises(PeerLostError, "another process of this run has ended", _answered, lambda dist: fail(RuntimeError("")))
    raises(torch.OutOfMemoryError, None, _answered, lambda dist: fail(torch.OutOfMemoryError("CUDA out of memory")))


def same_numbers(a: object, b: object) -> bool:
    """Equal ranks and counts, and variances to the last digits that the size of a batch moves."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_numbers(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_numbers, a, b))
    return a == pytest.approx(b, rel=1e-6) if isinstance(a, float) else a == b


@pytest.mark.slow
def test_a_run_of_two_processes_evaluates_and_resumes_like_one(tmp_path, sfumato):
    recipe = make_toy(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = succeed(2, command, "train", recipe, "--out", whole, *HALF)
    lines = log_of(whole)
    assert [line["epoch"] for line in lines] == list(range(12)) and lines[1]["val/score"] > 0
    # On some processors the tiny model has learnt too little to be calibrated, and says so, once.
    assert (whole / "calibration.json").exists() != any("are not calibrated" in each for each in said)
    # Evaluated by one process and by three, whose parts are uneven: the same file.
    alone = sfumato.json("evaluate", "run", whole)
    (whole / "evaluation-test-csd.json").unlink()
    succeed(3, command, "evaluate", "run", whole)
    assert same_numbers(alone, json.loads((whole / "evaluation-test-csd.json").read_text()))
    # Killed after the first steps and started again: the same bits, and saves do not change them.
    processes = process_group(2, command, "train", recipe, "--out", parts, *HALF, "train.save_minutes=1e-9")
    deadline = time.monotonic() + 60
    while not (parts / "last.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    processes[1].kill()
    started = time.monotonic()
    status, said = processes[0].finish(90)
    assert time.monotonic() - started < 80
    assert status == 1 and "another process of this run has ended" in said, (status, said)
    assert "Traceback" not in said
    said = succeed(2, command, "train", recipe, "--out", parts, *HALF, "train.save_minutes=1e-9")
    assert "resuming in epoch" in said[0], said
    a, b = load_file(whole / "last.safetensors"), load_file(parts / "last.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


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
            yield list(map(ShardSample, "abcd", pictures, ["A red  dog", "a red dog", "a red dog.", "red"]))

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


def plain_loss(image, text, match, options):
    distance = get_distance(options.distance).matrix(image, text)
    logit = options.logit_bias - options.logit_scale * distance
    cross_entropy = functional.binary_cross_entropy_with_logits(logit, match)
    return {"match": cross_entropy, "log_sum": 0.1 * distance.logsumexp((0, 1))}


def gradients_of_losses(out: Path, sizes: list[int]) -> None:
    with join_process_group(lambda _: torch.device("cpu"), 1.0) as process_group:
        tensors, measured = {}, {}
        register_loss("plain", plain_loss, PCMEPPOptions)
        for loss_name, entry in LOSSES.items():
            # PCME with its uniformity, whose sum within a logarithm crosses all processes.
            options = (PCMEOptions(uniformity_weight=0.5),) if loss_name == "pcme" else ()
            model, loss = build(), entry(*options).double()
            for step, n in enumerate(sizes):
                model.zero_grad()
                loss.zero_grad()
                case, batch = f"{loss_name}/{step}", pairs(n, process_group, step)
                measured[case] = forward_backward(model, loss, batch, process_group, epoch=5)
                for name, parameter in [*model.named_parameters(), *loss.named_parameters()]:
                    if parameter.grad is not None:
                        tensors[f"{case}/{name}"] = parameter.grad.clone()
        save_file(tensors, out / f"{process_group.size}-{process_group.rank}.safetensors")
        (out / f"{process_group.size}-{process_group.rank}.json").write_text(json.dumps(measured))

"""The batches of an epoch. Pictures of one colour and texts of one word piece say their own position.
The background iterator: the same items, never too far ahead, no thread left behind; trackers of runs."""

import contextlib
import inspect
import itertools
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.pictures import png
from support.raising import raises
from support.toy import log_of, make_toy
from tokenizers import Tokenizer, models

from sfumato import fit, load_recipe
from sfumato.data.images import FileImage
from sfumato.data.pairs import PairBatch, PairData, PairSampler
from sfumato.data.shards import ShardSample
from sfumato.data.transforms import MixPlan
from sfumato.encoders.encoder_protocol import Inputs, PixelStore, RaggedStore
from sfumato.encoders.feature_rows import FeatureInput
from sfumato.encoders.heads import GaussianHead
from sfumato.encoders.processors import PixelProcessor, TokenProcessor, add_begin_and_end, train_tokenizer
from sfumato.errors import UserError
from sfumato.models.build import DualEncoder, Tower
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.recipe import check_recipe
from sfumato.training import batches as module
from sfumato.training import saving
from sfumato.training.batches import Augmentation, IndexedBatches, ShardBatches, epoch_seed, prefetch

CPU = torch.device("cpu")
WORDS = [f"{a}{b}" for a in "abcd" for b in "efgh"]
TOKENIZER = train_tokenizer(WORDS, 60)
plan_tensors = lambda plan: [] if plan is None else [plan.partner, plan.own_fraction, plan.box]


def recipe(*, style=False, seed=0, **augment):
    image = {"kind": "small", "size": 16, "augment": style}
    return check_recipe({"name": "x", "model": {"image": image}, "augment": augment, "train": {"seed": seed}}, "here")


def model(tokenizer=TOKENIZER):
    processors = PixelProcessor(16), TokenProcessor(tokenizer, 9)
    return DualEncoder(*(Tower(one, FeatureInput(4, 0.0), GaussianHead(4, 3)) for one in processors))


def shared_captions():
    """10 images and 7 texts: text 0 belongs to images 0, 1 and 2, text 1 to 2 and 3; image 9 has two of its own."""
    pairs = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4), (9, 5), (9, 6)]
    images, texts = ([f"{letter}{k}" for k in range(n)] for letter, n in (("i", 10), ("t", 7)))
    files = tuple(FileImage(f"{k}.png") for k in range(10))
    return PairData(tuple(images), files, tuple(texts), tuple(WORDS[:7]), ("caption",) * 7, pairs)


def indexed(settings, process_group):
    data = shared_captions()
    n, m = len(data.image_ids), len(data.text_ids)
    pixels = torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(n, 3, 16, 16).clone()
    texts = RaggedStore.from_list([[k] * (1 + k % 3) for k in range(m)])
    sampler = PairSampler(data, 7, settings.train.seed, epoch_over="pairs")
    augmentation = Augmentation(settings, model(), process_group)
    return IndexedBatches(PixelStore(pixels), texts, sampler, augmentation, process_group)


def drawn(batch):
    return batch.images.values[:, 0, 0, 0].tolist(), batch.texts.values[:, 0].tolist()


def same(a, b):
    tensors = lambda x: [x.images.values, x.texts.values, x.texts.mask, *x.labels(alone()), *plan_tensors(x.mix)]
    return all(map(torch.equal, tensors(a), tensors(b)))


def fixed_plan(n, **_):
    """Mixup of the first picture with three tenths of the last, and of the last with a quarter of the first."""
    partner, share, box = torch.arange(n), torch.ones(n), torch.zeros(n, 4, dtype=torch.int64)
    partner[0], partner[-1] = n - 1, 0
    share[0], share[-1] = 0.7, 0.75
    return MixPlan(partner, share, box, (16, 16))


PICTURES, TEXTS = [0, 2, 4, 3], [0, 1, 2, 1]
# Listed: text 0 with pictures 0 and 2, text 1 (drawn twice) with pictures 2 and 3, text 2 with picture 4.
LISTED = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 1]])
# Row 0: 0.7 of its own and 0.3 of row 3; row 3: 0.75 of its own and 0.25 of row 0.
MIXED = torch.tensor([[0.7, 0.3, 0, 0.3], [1, 1, 0, 1], [0, 0, 1, 0], [0.25, 0.75, 0, 0.75]])


@pytest.mark.parametrize(("augment", "expected"), [
    ({}, LISTED),
    ({"label_smoothing": 0.1}, 0.1 + 0.8 * LISTED),
    ({"mixed_share": 0.25}, MIXED),
    ({"mixed_share": 0.25, "label_smoothing": 0.1}, 0.1 + 0.8 * MIXED),
])  # fmt: skip
def test_labels_by_hand_with_duplicate_captions(augment, expected, monkeypatch):
    monkeypatch.setattr(module, "plan_mixing", fixed_plan)
    batches = indexed(recipe(**augment), alone())
    images, texts = np.array(PICTURES), np.array(TEXTS)
    labels = lambda rows, columns: batches.sampler._labels(images, texts, rows, columns)
    monkeypatch.setattr(batches.sampler, "batches", lambda epoch: [PairBatch(images, texts, labels)])
    (batch,) = batches.epoch(0)
    assert drawn(batch) == (PICTURES, TEXTS)
    i2t, t2i = batch.labels(alone())
    torch.testing.assert_close(i2t, expected)
    torch.testing.assert_close(t2i, expected.T)
    assert (batch.mix is None) == ("mixed_share" not in augment)
    if batch.mix is not None:
        # The pixels are left to the mix that the labels know of: 0.7 of picture 0 and 0.3 of picture 3.
        torch.testing.assert_close(batch.mix.apply(batch.images.values)[0, 0, 0, 0], torch.tensor(0.9 / 255))


def test_seeds_of_different_streams_differ_and_fit_a_generator():
    keys = []
    for seed, epoch, rank in itertools.product(range(3), range(4), range(3)):
        own = (rank,) if rank else ()
        keys += [(seed, epoch, 0, *own), (seed, epoch, 1, *own), *((seed, epoch, 2, step, rank) for step in range(5))]
    seeds = [epoch_seed(*key) for key in keys]
    assert len(set(keys)) == len(set(seeds)) == 3 * 4 * 3 * 7 and seeds == [epoch_seed(*key) for key in keys]
    assert all(0 <= s < 2**63 for s in seeds) and min(seeds).bit_length() > 40, "spread over all sizes"
    assert len({torch.rand((), generator=torch.Generator().manual_seed(s)).item() for s in seeds}) == len(seeds)


@pytest.mark.parametrize("style", [False, True])
def test_an_epoch_follows_from_its_number_and_the_seed_alone(style):
    settings = recipe(style=style, mixed_share=0.5, text_tokens=0.5)
    straight = {epoch: list(indexed(settings, alone()).epoch(epoch)) for epoch in range(3)}
    batches = indexed(settings, alone())
    torch.manual_seed(0)
    for epoch in (2, 0, 2, 1):
        torch.rand(3)  # The global stream is nobody's here.
        np.random.rand(3)
        again = list(batches.epoch(epoch))
        assert len(again) == len(straight[epoch]) == len(batches) == 2
        assert all(map(same, again, straight[epoch]))
    # Each on its own: which pairs, what of them is mixed, and how they are changed.
    first, second = straight[0][0], straight[1][0]
    pairs = [drawn(next(iter(indexed(recipe(), alone()).epoch(epoch)))) for epoch in (0, 1)]
    assert pairs[0] != pairs[1]
    assert not all(map(torch.equal, plan_tensors(first.mix), plan_tensors(second.mix)))
    draws = [batches.augmentation.generator(*key).initial_seed() for key in ((0, 0), (1, 0), (0, 1), (0, 0))]
    assert draws[0] == draws[3] and len(set(draws)) == 3
    steps = [plan_tensors(batches.augmentation.plans([6], (16, 16), 0, step)[0]) for step in (0, 1)]
    assert all(map(torch.equal, steps[0], plan_tensors(first.mix))) and not all(map(torch.equal, *steps))
    assert not same(first, next(iter(indexed(recipe(style=style, mixed_share=0.5, seed=1), alone()).epoch(0))))


def test_images_and_words_change_as_the_recipe_says_and_independently_in_each_process():
    everything = [drawn(b) for b in indexed(recipe(), alone()).epoch(0)]
    assert sorted(i for images, _ in everything for i in images) == sorted(i for i, _ in shared_captions().pairs)
    first = lambda **changes: next(iter(indexed(recipe(**changes), alone()).epoch(0)))
    plain, styled, erased = first(), first(style=True), first(erase=1)
    damaged, shorter = first(text_tokens=0.9), first(drop_words=0.9)
    pixels = plain.images.values / 255
    assert plain.images.values.dtype == torch.uint8 and not torch.equal(styled.images.values.float(), pixels)
    assert erased.images.values.ne(pixels).flatten(1).any(1).all()
    for same_texts in (styled, erased):
        assert torch.equal(same_texts.texts.values, plain.texts.values)
    for same_images in (damaged, shorter):  # Words draw after the images of their batch.
        assert torch.equal(same_images.images.values, plain.images.values)
        mask = same_images.texts.mask
        assert mask.sum() < plain.texts.mask.sum() and mask.any(1).all()
    # Texts repeat one id: what is left of them is that id still, which masking or replacing words would change.
    assert torch.equal(shorter.texts.values[:, 0], plain.texts.values[:, 0])
    assert set(shorter.texts.values.unique().tolist()) <= set(plain.texts.values.unique().tolist()) | {0}
    pictures = PixelStore(torch.full((4, 3, 16, 16), 90, dtype=torch.uint8))
    words = Inputs(torch.ones(4, 9, dtype=torch.int64), torch.ones(4, 9, dtype=torch.bool))
    found = []
    for rank in range(3):
        augmentation = Augmentation(recipe(style=True, text_tokens=0.5), model(), ProcessGroup(rank, 3, CPU))
        generator = augmentation.generator(0, 0)
        images = augmentation.images(pictures, np.arange(4), generator)
        found.append((images.values, augmentation.texts(words, generator).values))
    for a, b in itertools.combinations(found, 2):
        assert not any(map(torch.equal, a, b))


def test_words_of_padded_texts_are_not_damaged_and_masking_needs_its_token():
    tokenizer = add_begin_and_end(train_tokenizer(WORDS, 60), 9)
    of_words = lambda **augment: Augmentation(recipe(**augment), model(tokenizer), alone())
    assert of_words(text_tokens=0.2).words is not None
    tokenizer.enable_padding(length=9)
    for name in ("text_tokens", "drop_words"):
        raises(UserError, rf"augment.{name} cannot be used with texts padded.*set it to 0", of_words, **{name: 0.2})
    assert of_words().words is None
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    assert TokenProcessor(tokenizer, 9).mask_id is None and 0 not in TokenProcessor(tokenizer, 9).forbidden
    with pytest.raises(UserError, match=r"augment.text_tokens masks words, but the tokenizer has none of .*\[MASK\]"):
        Augmentation(recipe(text_tokens=0.2), model(tokenizer), alone())
    words = Inputs(torch.ones(40, 5, dtype=torch.int64), torch.ones(40, 5, dtype=torch.bool))
    left = Augmentation(recipe(drop_words=0.5), model(tokenizer), alone()).texts(words, torch.Generator())
    assert left.mask.sum() < 150 and set(left.values[left.mask].tolist()) == {1}


@pytest.mark.parametrize("size", [4, 5, 8])
def test_processes_share_the_batches_of_one_without_gaps_or_doubles(size):
    settings = recipe(mixed_share=0.8, label_smoothing=0.05)
    whole = list(indexed(settings, alone()).epoch(3))
    parts = [list(indexed(settings, ProcessGroup(rank, size, CPU)).epoch(3)) for rank in range(size)]
    assert [len(b.images) for b in whole] == [6, 6]  # No multiple of the processes.
    mixed = 0
    for batch, shares in zip(whole, zip(*parts, strict=True), strict=True):
        images, texts = zip(*map(drawn, shares), strict=True)
        assert tuple(list(itertools.chain(*side)) for side in (images, texts)) == drawn(batch)
        assert max(map(len, images)) - min(map(len, images)) <= 1
        i2t, t2i = (torch.cat(rows) for rows in zip(*(share.labels(alone()) for share in shares), strict=True))
        # Each process made its rows by its own plans and those of the others: one matrix, seen from both sides.
        assert torch.equal(i2t, t2i.T)
        listed = torch.from_numpy(shared_captions().match(*map(np.array, drawn(batch))))
        row = 0
        for share in shares:
            n, plan = len(share.images), share.mix
            mixed += int((plan.own_fraction < 1).sum())
            own = plan.own_fraction.unsqueeze(1)
            expected = own * listed[row : row + n] + (1 - own) * listed[row : row + n][plan.partner]
            torch.testing.assert_close(i2t[row : row + n], 0.05 + 0.9 * expected)
            row += n
    assert mixed >= (4 if size < 8 else 0)  # Eight processes have parts of one pair, or none.


class Told:
    """What the processes would tell each other, put together beforehand; of the first round it only listens."""

    def __init__(self, counts, keys=None):
        self.numbers, self.keys, self.heard = counts, keys, None

    def counts(self, own):
        return self.numbers

    def gather(self, value, counts):
        assert counts == self.numbers
        self.heard = value
        return value.new_zeros(sum(counts), *value.shape[1:]) if self.keys is None else self.keys


def test_processes_of_a_stream_match_equal_captions_across_each_other():
    """Two streams of their own; the second loses a picture, so that it holds fewer pairs than it read."""
    captions = [["ae", "bf", "ae", "cg"], ["bf", "lost", "dh", "ae"]]
    settings, skipped = recipe(mixed_share=0.9, label_smoothing=0.1, seed=2), []

    class Stream:
        def __init__(self, rank):
            self.rank = rank

        def skip(self, key, reason):
            skipped.append(key)

        def batches(self, epoch):
            drawn = [png((10 * k + self.rank,) * 3, (16, 16)) for k in range(4)]
            pictures = [b"" if c == "lost" else one for one, c in zip(drawn, captions[self.rank], strict=True)]
            yield list(map(ShardSample, [f"{self.rank}{k}" for k in range(4)], pictures, captions[self.rank]))

    shares = []
    for rank in range(2):
        process_group = ProcessGroup(rank, 2, CPU)
        augmentation = Augmentation(settings, model(), process_group)
        shares += ShardBatches(Stream(rank), model(), augmentation, process_group).epoch(5)
    assert skipped == ["11"] and [len(s.images) for s in shares] == [4, 3]
    assert shares[1].images.values[:, 0, 0, 0].tolist() == [1, 21, 31]
    read, _ = model().text.processor.read([lambda c=c: c for c in ("bf", "dh", "ae")])
    assert np.array_equal(shares[1].texts.values, read.batch(np.arange(3)).values), "of the pictures that are left"
    listening = [Told([4, 3]), Told([4, 3])]
    for share, told in zip(shares, listening, strict=True):
        share.labels(told)
    keys = torch.cat([told.heard for told in listening])
    i2t, t2i = (torch.cat(rows) for rows in zip(*(share.labels(Told([4, 3], keys)) for share in shares), strict=True))
    assert torch.equal(i2t, t2i.T)
    texts = [c for c in itertools.chain(*captions) if c != "lost"]
    equal = torch.tensor([[float(a == b) for b in texts] for a in texts])
    assert equal[0, 6] == equal[1, 4] == 1
    plan = MixPlan.cat([share.mix for share in shares])
    own = plan.own_fraction.unsqueeze(1)
    assert (own < 1).sum() >= 3
    torch.testing.assert_close(i2t, 0.1 + 0.8 * (own * equal + (1 - own) * equal[plan.partner]))
    # A process alone would know of no match with the other's captions.
    assert equal[:4, 4:].any()


def test_whole_batches_are_mixed_with_one_ratio_or_not_at_all():
    """Equal on all processes, a quarter of the batches, Mixup or CutMix, every image with its mirror in the part."""
    settings = recipe(mixed_share=0.25, mix_choice="whole")
    sides = [Augmentation(settings, model(), ProcessGroup(rank, 2, CPU)) for rank in (0, 1)]
    kinds = []
    for step in range(400):
        plans, others = (side.plans([5, 2], (16, 16), 0, step) for side in sides)
        if plans is None:
            assert others is None
            kinds.append("none")
            continue
        first, second = plans
        assert all(all(map(torch.equal, plan_tensors(p), plan_tensors(q))) for p, q in zip(plans, others, strict=True))
        assert first.partner.tolist() == [4, 3, 2, 1, 0] and second.partner.tolist() == [1, 0]
        assert len({*first.own_fraction.tolist(), *second.own_fraction.tolist()}) == 1
        assert len({*map(tuple, first.box.tolist()), *map(tuple, second.box.tolist())}) == 1
        kinds.append("cut" if first.cut.any() else "mixed")
    # Of 400 batches 100 are expected to be mixed, half of them cut: bounds of 5 standard errors.
    assert abs(400 - kinds.count("none") - 100) < 44 and abs(kinds.count("cut") - 50) < 34
    plans = next(p for step in range(400) if (p := sides[0].plans([5, 2], (16, 16), 0, step)))
    fraction = plans[0].own_fraction[0]
    mixed = fraction * torch.eye(5) + (1 - fraction) * torch.eye(5).flip(0)
    torch.testing.assert_close(plans[0].match(torch.eye(5)), mixed)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """But those of an event loop that an earlier test of the process has left."""
    own = lambda: {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
    before = own()
    yield
    assert own() == before


def test_items_are_made_in_a_thread_while_the_consumer_works():
    made = []

    def source():
        for i in range(5):
            made.append((i, threading.current_thread()))
            yield i

    items = prefetch(source(), 2)
    assert made == []
    assert next(items) == 0
    end = time.monotonic() + 10
    while len(made) < 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.05)
    # 0 is with the consumer; 1 and 2 wait; 3 is not begun.
    assert [i for i, _ in made] == [0, 1, 2] and threading.current_thread() not in {t for _, t in made}
    assert list(items) == [1, 2, 3, 4]


def test_an_exception_comes_after_the_items_before_it_and_a_consumer_that_stops_early_closes_the_source():
    def source():
        yield 1
        yield 2
        raise KeyError("the third")

    seen = []
    with pytest.raises(KeyError, match="the third") as caught:
        for item in prefetch(source(), 5):
            seen.append(item)
    assert seen == [1, 2]
    assert "source" in {entry.name for entry in caught.traceback}
    closed = []
    items = prefetch(endless(closed), 2)
    assert next(items) == 0
    thread = next(t for t in threading.enumerate() if t.name.startswith("prefetch"))
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 1 and not thread.is_alive() and len(closed) == 1
    for item in prefetch(endless(closed)):
        if item == 3:
            break
    with pytest.raises(ZeroDivisionError):
        for item in prefetch(endless(closed)):
            1 / (3 - item)
    assert len(closed) == 3
    code = "import itertools\nfrom typing import *\nfrom collections import deque\nfrom collections.abc import *\n"
    code += "from concurrent.futures import ThreadPoolExecutor\n"
    code += f"T = TypeVar('T')\n{inspect.getsource(prefetch)}\nitems = prefetch(itertools.count())\nnext(items)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def endless(closed):
    try:
        yield from itertools.count()
    finally:
        closed.append(threading.current_thread())


def test_a_callback_gets_every_epoch_once(tmp_path):
    recipe, seen = make_toy(tmp_path), []
    fit(load_recipe(recipe, ["train.epochs=1"]), tmp_path / "run", on_epoch=seen.append)
    fit(load_recipe(recipe, ["train.epochs=2"]), tmp_path / "run", on_epoch=seen.append)
    assert seen == log_of(tmp_path / "run") and [line["epoch"] for line in seen] == [0, 1]
    assert {"loss", "seconds", "logit_scale"} <= seen[0].keys()


def test_trackers_get_the_settings_and_the_figures_of_an_epoch(tmp_path, monkeypatch):
    """By stand-ins for the packages, which no installation of the tests has."""
    recipe, given = load_recipe(make_toy(tmp_path), ["train.tracker=wandb"]), []
    log = lambda figures, step: given.append((step, figures))
    run = SimpleNamespace(log=log, flush=list, add_scalar=lambda key, value, step: log({key: value}, step))
    start = lambda *place, **options: given.append(options) or contextlib.nullcontext(run)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=start))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=start))
    mlflow = SimpleNamespace(start_run=start, log_params=given.append, log_metrics=log)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for name in ("tensorboard", "wandb", "mlflow"):
        with saving.tracked(name, recipe, tmp_path / "run") as write:
            write({"epoch": 1, "loss/match": 0.5, "recall@1": 2, "note": "no figure"})
    figures = {"epoch": 1.0, "loss/match": 0.5, "recall@1": 2.0}
    assert given[1:4] == [(1, {key: value}) for key, value in figures.items()] and given[5] == (1, figures)
    assert given[4]["config"]["train.tracker"] == given[7]["train.tracker"] == "wandb" and given[4]["name"] == "run"
    assert given[6] == {"run_name": "run"} and given[8][1] == {"epoch": 1.0, "loss.match": 0.5, "recall_at_1": 2.0}

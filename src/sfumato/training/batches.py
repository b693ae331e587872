"""The batches of an epoch for one process: the pairs, their augmentation and their labels.

All random choices depend only on (seed, epoch, step, process), so an interrupted run repeats its steps bit for bit.
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sfumato.data import transforms
from sfumato.data.pairs import EqualTexts, PairBatch, PairSampler, normal_wording
from sfumato.data.shards import ShardSample, ShardStream
from sfumato.data.transforms import MixPlan, plan_mixing
from sfumato.encoders.encoder_protocol import Inputs, Store
from sfumato.encoders.processors import MASK_TOKENS, ImageFileStore, TokenProcessor
from sfumato.errors import UserError, progress_bar
from sfumato.models.build import DualEncoder
from sfumato.models.process_group import ProcessGroup
from sfumato.models.recipe import Recipe
from sfumato.models.sections import AugmentConfig
from sfumato.training.step import TrainBatch


def epoch_seed(*key: int) -> int:
    """A seed from several numbers, such as (seed, epoch, stream, step); keys that differ give independent seeds."""
    return int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0] >> 1)


class Augmentation:
    """The random changes of a recipe, applied to one process's part of a batch."""

    def __init__(self, recipe: Recipe, model: DualEncoder, process_group: ProcessGroup) -> None:
        self.config: AugmentConfig = recipe.augment
        self.seed, self.process_group = recipe.train.seed, process_group
        self.pictures = recipe.model.image.augment_mode
        processor = model.text.processor
        changes = [key for key in ("text_tokens", "drop_words") if getattr(self.config, key)]
        self.words = processor if isinstance(processor, TokenProcessor) and changes else None
        if self.words is not None and self.config.text_tokens and self.words.mask_id is None:
            needed = f"none of the tokens {', '.join(MASK_TOKENS)}; set it to 0, or give a tokenizer with one of them"
            raise UserError(f"augment.text_tokens masks words, but the tokenizer has {needed}")
        if self.words is not None and self.words.tokenizer.padding is not None:
            why = "with texts padded to one length for an encoder that reads the padding (SigLIP)"
            raise UserError(f"augment.{changes[0]} cannot be used {why}; set it to 0")

    def generator(self, epoch: int, step: int) -> torch.Generator:
        """The random generator of a step's changes on this process."""
        return torch.Generator().manual_seed(epoch_seed(self.seed, epoch, 1, step, self.process_group.rank))

    def images(self, store: Store, index: np.ndarray, generator: torch.Generator) -> Inputs:
        """The images at some positions, augmented as in the recipe. index (r,)."""
        inputs = self._reshaped(store, index, generator)
        if not self.config.erase or not len(index):
            return inputs
        return Inputs(transforms.erase_rectangles(inputs.values, fraction=self.config.erase, generator=generator))

    def _reshaped(self, store: Store, index: np.ndarray, generator: torch.Generator) -> Inputs:
        """The images with random changes of geometry and colour."""
        if self.pictures in ("crop", "resized-crop") and isinstance(store, ImageFileStore):
            seed_key = [int(torch.randint(2**62, (), generator=generator))]
            return store.training_batch(index, seed_key, resized_crop=self.pictures == "resized-crop").to("cpu")
        inputs = store.batch(index).to("cpu")
        if self.pictures == "none" or not len(index):  # More processes than pairs.
            return inputs
        change = transforms.augment if self.pictures == "style" else transforms.crop_and_mirror
        return Inputs(change(inputs.values, generator=generator))

    def texts(self, inputs: Inputs, generator: torch.Generator) -> Inputs:
        """Texts with some tokens masked, replaced or deleted. inputs (r, t)."""
        if self.words is None or inputs.mask is None:
            return inputs
        ids, mask = inputs.values, inputs.mask
        # (rate, masked fraction, replaced fraction) of the chosen tokens: SizeAugment, then PCME's caption dropping.
        for rate, masked, replaced in ((self.config.text_tokens, 0.5, 0.1), (self.config.drop_words, 0.0, 0.0)):
            if rate:
                ids, mask = transforms.augment_token_ids(
                    ids, mask, special=self.words.special, mask_id=self.words.mask_id,
                    vocabulary_size=self.words.tokenizer.get_vocab_size(), forbidden=self.words.forbidden, rate=rate,
                    masked=masked, replaced=replaced, generator=generator,
                )  # fmt: skip
        return Inputs(ids, mask)

    def plans(self, counts: list[int], size: tuple[int, int], epoch: int, step: int) -> list[MixPlan] | None:
        """The mixing plans of all processes in a step, the same on every process. size (height, width)."""
        config = self.config
        if not config.mixed_share:
            return None

        def seeded(*rank: int) -> torch.Generator:
            return torch.Generator().manual_seed(epoch_seed(self.seed, epoch, 2, step, *rank))

        plan = partial(plan_mixing, size=size, mixup_alpha=config.mixup_alpha, cutmix_alpha=config.cutmix_alpha)
        if config.mix_choice != "whole":
            own = partial(plan, fraction=config.mixed_share, choice=config.mix_choice)
            return [own(n, generator=seeded(rank), choice_generator=seeded(0)) for rank, n in enumerate(counts)]
        # All images have one ratio and one box, or none is mixed with probability 1 - mixed_share.
        generator = seeded()
        if torch.rand((), generator=generator) >= config.mixed_share:
            return None
        pair = plan(2, generator=generator, fraction=1.0)
        fraction, box = pair.own_fraction[:1], pair.box[:1]
        return [MixPlan(torch.arange(n).flip(0), fraction.expand(n), box.expand(n, 4), size) for n in counts]

    def labels(self, match_i2t: Tensor, match_t2i: Tensor, plans: list[MixPlan] | None) -> tuple[Tensor, Tensor]:
        """Labels after mixing and smoothing. match_i2t (r, n), match_t2i (r, n)."""
        if plans is not None:
            match_i2t = plans[self.process_group.rank].match(match_i2t)
            match_t2i = MixPlan.cat(plans).match(match_t2i.T).T
        if smoothing := self.config.label_smoothing:
            match_i2t, match_t2i = (transforms.smooth_match(m, smoothing) for m in (match_i2t, match_t2i))
        return match_i2t, match_t2i


class IndexedBatches:
    """Batches of a split whose pairs are all known."""

    def __init__(
        self, images: Store, texts: Store, sampler: PairSampler, augmentation: Augmentation, process_group: ProcessGroup
    ) -> None:
        self.images, self.texts, self.sampler = images, texts, sampler
        self.augmentation, self.process_group = augmentation, process_group

    def prepare(self, model: DualEncoder) -> None:
        """Convert the inputs to the form that costs the encoders least at every step."""
        self.images = model.image.encoder.prepared(self.images)
        self.texts = model.text.encoder.prepared(self.texts)

    def __len__(self) -> int:
        return len(self.sampler)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[TrainBatch]:
        """This process's parts of the batches of an epoch from a step on; equal for equal epochs."""
        for step, batch in itertools.islice(enumerate(self.sampler.batches(epoch)), first, None):
            yield self._batch(batch, epoch, step)

    def _batch(self, batch: PairBatch, epoch: int, step: int) -> TrainBatch:
        generator = self.augmentation.generator(epoch, step)
        own, everything = self.process_group.part(len(batch)), np.arange(len(batch))
        images = self.augmentation.images(self.images, batch.image_index[own], generator)
        texts = self.augmentation.texts(self.texts.batch(batch.text_index[own]).to("cpu"), generator)
        counts = [len(self.process_group.part(len(batch), rank)) for rank in range(self.process_group.size)]
        height, width = images.values.shape[-2:]
        plans = self.augmentation.plans(counts, (height, width), epoch, step)
        i2t, t2i = (torch.from_numpy(batch.labels(*index)) for index in ((own, everything), (everything, own)))
        labels = self.augmentation.labels(i2t, t2i.T, plans)
        return TrainBatch(images, texts, lambda _: labels, plans[self.process_group.rank] if plans else None)


@dataclass(frozen=True, eq=False)
class ShardBatches:
    """Batches of a stream of shards, in the order in which they are read; pairs with an equal image or text match."""

    stream: ShardStream
    model: DualEncoder
    augmentation: Augmentation
    process_group: ProcessGroup
    equal_texts: EqualTexts = "merged"

    def __len__(self) -> int:
        return len(self.stream)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[TrainBatch]:
        """The same of a stream. An image that cannot be decoded is reported, and its pair is missing from the batch."""
        with closing(self.stream.batches(epoch)) as batches:
            for step, batch in itertools.islice(enumerate(batches), first, None):
                yield self._batch(batch, epoch, step)

    def _batch(self, batch: Sequence[ShardSample], epoch: int, step: int) -> TrainBatch:
        generator = self.augmentation.generator(epoch, step)
        pictures, kept = self.model.image.processor.read(
            [partial(bytes, sample.image) for sample in batch],
            on_error=lambda i, error: self.stream.skip(batch[i].key, str(error)),
        )
        words, _ = self.model.text.processor.read([partial(str, sample.text) for sample in batch])
        images = self.augmentation.images(pictures, np.arange(len(kept)), generator)
        texts = self.augmentation.texts(words.batch(kept).to("cpu"), generator)
        wording = normal_wording if self.equal_texts == "merged" else str
        contents = [batch[i].image for i in kept], [wording(batch[i].text).encode() for i in kept]
        keys = torch.stack([_digests(side) for side in contents], 1)
        height, width = images.values.shape[-2:]

        def labels(process_group: ProcessGroup) -> tuple[Tensor, Tensor]:
            counts = process_group.counts(len(kept))
            match = (keys[:, None] == process_group.gather(keys, counts)).any(-1).float()
            return self.augmentation.labels(match, match, self.augmentation.plans(counts, (height, width), epoch, step))

        alone_counts = [len(kept) if rank == self.process_group.rank else 0 for rank in range(self.process_group.size)]
        plans = self.augmentation.plans(alone_counts, (height, width), epoch, step)
        return TrainBatch(images, texts, labels, plans[self.process_group.rank] if plans else None)


Batches = IndexedBatches | ShardBatches


def _digests(contents: Sequence[bytes]) -> Tensor:
    """(n,) int64, equal for equal contents."""
    return torch.from_numpy(np.frombuffer(b"".join(hashlib.sha256(c).digest()[:8] for c in contents), "<i8").copy())


T = TypeVar("T")


def prefetch(source: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Run an iterator in a background thread, at most ``depth`` items ahead of its consumer.

    The thread starts when the first item is requested. It ends with the source, with an exception of the source, or
    when the consumer closes the generator (leaving a loop does that). On closing, the item in work is finished, the
    source is closed, and then ``close`` returns.
    """
    items = iter(source)
    with ThreadPoolExecutor(1, "prefetch") as pool:
        coming = deque(pool.submit(tuple, itertools.islice(items, 1)) for _ in range(depth))
        try:
            while found := coming.popleft().result():
                coming.append(pool.submit(tuple, itertools.islice(items, 1)))
                yield from found
                del found  # Else it stays in memory until the next item arrives.
        finally:
            pool.shutdown(cancel_futures=True)
            if isinstance(items, Generator):
                items.close()


def steps(batches: Batches, epoch: int, epochs: int, *, first: int) -> Generator[TrainBatch, None, None]:
    """The batches of an epoch from a step on, made ahead in a thread, with a progress bar."""
    bar = progress_bar(f"epoch {epoch + 1}/{epochs}", len(batches))
    with bar as advance, closing(prefetch(batches.epoch(epoch, first))) as coming:
        advance(first)
        for batch in coming:
            yield batch
            advance(1)

"""The two-dimensional study of the PCME++ paper: do learnt variances tell certain samples from ambiguous ones?

The samples themselves are the parameters; no network is trained. This part makes the data, optimises and draws. The losses
are the package's own.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import LossOutput
from sfumato.losses.pcmepp import PCMEPPOptions, pcmepp_loss
from sfumato.losses.triplet import Mining, TripletOptions, triplet_loss
from sfumato.progress import progress_bar

METHODS = ("csd", "wasserstein2", "triplet_sum", "triplet_hardest")
"""Match loss with either distance; triplets of points with all negatives, and with the hardest one."""

PUBLISHED_RATIO = {"csd": 1.82, "wasserstein2": 1.04}
"""Mean variance of uncertain over that of certain samples, Chun 2024, A.2."""

CLASSES, PER_CLASS, UNCERTAIN_PER_CLASS = 3, 500, 150

_FRAMES, _PANEL, _TITLE = 48, 340, 46
_COLOURS = ((214, 69, 65), (226, 168, 20), (46, 140, 87), (140, 86, 160), (70, 130, 200), (90, 90, 100))
"""Of certain samples of the three classes, then of those between classes 1-2, 2-3 and 3-1."""


@dataclass(frozen=True)
class ToyData:
    """The samples before training; n = 1500.

    Attributes:
        embedding: (n, 2) means around the centroids, and log variances.
        label: (n,) class 0, 1 or 2; of an uncertain sample the first of its two.
        uncertain: (n,) whether a sample's class is drawn anew, between label and label + 1 (mod 3), whenever it is used.
    """

    embedding: GaussianEmbedding
    label: Tensor
    uncertain: Tensor


@dataclass(frozen=True)
class ToyRun:
    """What one method made of the samples.

    Attributes:
        certain: mean variance of the certain samples, over samples and both dimensions; None of points.
        uncertain: the same of the uncertain ones.
        updates: number of updates after which each of the frames was taken.
        frames: the embeddings then; the first is the start, the last the result.
    """

    certain: float | None
    uncertain: float | None
    updates: list[int]
    frames: list[GaussianEmbedding]

    @property
    def ratio(self) -> float | None:
        """Uncertain over certain; None of points, which have no variance."""
        return None if self.certain is None or self.uncertain is None else self.uncertain / self.certain


def toy_data(generator: torch.Generator) -> ToyData:
    """1050 certain and 450 uncertain samples in two dimensions.

    The centroids are standard normal, the samples lie around them with a standard deviation of 0.1, and log sigma of each
    dimension is uniform in [-1.5, 1.5].

    Args:
        generator: of all that is random.
    """
    label = torch.arange(CLASSES).repeat_interleave(PER_CLASS)  # (n,)
    uncertain = torch.arange(PER_CLASS).repeat(CLASSES) >= PER_CLASS - UNCERTAIN_PER_CLASS  # (n,)
    centroid = torch.randn(CLASSES, 2, generator=generator)
    mean = centroid[label] + 0.1 * torch.randn(len(label), 2, generator=generator)
    log_sigma = torch.rand(len(label), 2, generator=generator) * 3 - 1.5
    return ToyData(GaussianEmbedding(mean, 2 * log_sigma), label, uncertain)


def train_toy(
    data: ToyData,
    method: str,
    *,
    generator: torch.Generator,
    updates: int = 500,
    batch_size: int = 128,
    lr: float = 0.02,
) -> ToyRun:
    """Optimise means and log variances with Adam under one method; a pair matches when both drew the same class.

    Every update compares two mini-batches without a common sample, as a batch of images with one of captions.

    Args:
        data: of :func:`toy_data`; left as it is.
        method: one of METHODS.
        generator: of the order of the samples and the classes of uncertain ones.
        updates: steps of the optimiser. The paper's "500 epochs" are taken for 500 mini-batches: docs/decisions/studies.md.
        batch_size: samples of each of the two mini-batches.
        lr: of the samples and of the loss's logits.

    Raises:
        ValueError: the method is unknown, updates is below 1, or a mini-batch is larger than half of the samples.
    """
    if updates < 1:
        raise ValueError(f"train_toy: updates must be at least 1, got {updates}")
    if not 0 < batch_size <= len(data.label) // 2:
        raise ValueError(f"train_toy: batch_size must be between 1 and {len(data.label) // 2}, got {batch_size}")
    loss = _loss(method)
    mean = data.embedding.mean.clone().requires_grad_()
    log_sigma = (data.embedding.log_var / 2).requires_grad_()
    scale, bias = (torch.tensor(5.0, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.Adam([mean, log_sigma, scale, bias], lr=lr)
    kept = {round(updates * (k / _FRAMES) ** 2) for k in range(_FRAMES + 1)}  # Most of the movement comes early.
    frames = [data.embedding]
    with progress_bar(method, updates) as advance:
        for update in range(1, updates + 1):
            both = torch.randperm(len(mean), generator=generator)[: 2 * batch_size].view(2, -1)  # (2, b)
            other = (torch.rand(both.shape, generator=generator) < 0.5) & data.uncertain[both]
            drawn = (data.label[both] + other.long()) % CLASSES
            match = (drawn[0].unsqueeze(1) == drawn[1]).to(mean.dtype)  # (b, b)
            left, right = (GaussianEmbedding(mean[batch], 2 * log_sigma[batch]) for batch in both)
            optimiser.zero_grad(set_to_none=True)
            loss(left, right, match, scale, bias).total.backward()
            optimiser.step()
            if update in kept:
                frames.append(GaussianEmbedding(mean.detach().clone(), 2 * log_sigma.detach()))
            advance(1)
    var = frames[-1].var
    has_variance = method in PUBLISHED_RATIO
    return ToyRun(
        certain=float(var[~data.uncertain].mean()) if has_variance else None,
        uncertain=float(var[data.uncertain].mean()) if has_variance else None,
        updates=sorted(kept | {0}),
        frames=frames,
    )


def _loss(method: str) -> Callable[[GaussianEmbedding, GaussianEmbedding, Tensor, Tensor, Tensor], LossOutput]:
    """(left, right, match, scale, bias of the logits) -> loss; triplets have no logits."""
    if method in PUBLISHED_RATIO:
        return lambda left, right, match, scale, bias: pcmepp_loss(
            left, right, match, PCMEPPOptions(distance=method, alpha=0.0, beta=0.0), logit_scale=scale, logit_bias=bias
        )
    if method in METHODS:
        mining: Mining = "sum" if method == "triplet_sum" else "hardest"
        return lambda left, right, match, scale, bias: triplet_loss(left, right, match, TripletOptions(mining=mining))
    raise ValueError(f"train_toy: unknown method {method!r}; known: {', '.join(METHODS)}")


def run_toy(out: Path, *, seed: int = 0, updates: int = 500, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Train with each method from the same start, and write a picture of the results and an animation of the learning.

    Args:
        out: folder for "toy.png" and "toy.gif"; made if it is not there.
        seed: of the samples and of each method's batches.
        updates: of each method; 500.
        methods: some of METHODS.

    Returns:
        {"seed", "updates", "ratio": {method: uncertain / certain}, "published_ratio", "certain", "uncertain": mean variances,
        "picture", "animation"}; null where a method has no variance.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = toy_data(torch.Generator().manual_seed(seed))
    runs = {
        method: train_toy(data, method, generator=torch.Generator().manual_seed(seed), updates=updates)
        for method in methods
    }
    pictures = _pictures(data, runs)
    write_atomically(out / "toy.png", _encoded(pictures[-1:], "PNG"))
    write_atomically(out / "toy.gif", _encoded(pictures, "GIF"))
    return {
        "seed": seed,
        "updates": updates,
        "ratio": {method: run.ratio for method, run in runs.items()},
        "published_ratio": {method: PUBLISHED_RATIO.get(method) for method in runs},
        "certain": {method: run.certain for method, run in runs.items()},
        "uncertain": {method: run.uncertain for method, run in runs.items()},
        "picture": str(out / "toy.png"),
        "animation": str(out / "toy.gif"),
    }


def _pictures(data: ToyData, runs: dict[str, ToyRun]) -> list[Image.Image]:
    """One picture a frame, a panel a method; a dot's radius grows with its standard deviation."""
    colour = torch.where(data.uncertain, data.label + CLASSES, data.label).tolist()
    order = data.uncertain.logical_not().sort(stable=True).indices.tolist()  # Uncertain samples lie below.
    steps = next(iter(runs.values())).updates
    pictures = []
    for k, update in enumerate(steps):
        picture = Image.new("RGB", (_PANEL * len(runs), _PANEL + _TITLE), "white")
        draw = ImageDraw.Draw(picture, "RGBA")
        for column, (method, run) in enumerate(runs.items()):
            left = column * _PANEL
            every = torch.cat([run.frames[0].mean, run.frames[k].mean])
            middle = (every.amax(0) + every.amin(0)) / 2
            scale = 0.42 * _PANEL / max(float((every - middle).abs().max()), 1e-6)
            places = ((run.frames[k].mean - middle) * scale + _PANEL / 2).tolist()
            deviation = run.frames[k].var.mean(1).sqrt() if run.certain is not None else torch.full((len(colour),), 0.3)
            radii = (1.2 + 3.2 * deviation.clamp_max(5)).tolist()
            for i in order:
                x, y, r = left + places[i][0], _TITLE + _PANEL - places[i][1], radii[i]
                draw.ellipse((x - r, y - r, x + r, y + r), fill=(*_COLOURS[colour[i]], 90))
            draw.line((left, 0, left, _PANEL + _TITLE), fill=(220, 220, 225, 255))
            draw.text((left + 10, 6), method, fill=(30, 36, 48, 255), font_size=15)
            now = run.frames[k].var
            ratio = float(now[data.uncertain].mean() / now[~data.uncertain].mean())
            told = f"variance ratio {ratio:.2f}" if run.certain is not None else "points, no variance"
            draw.text((left + 10, 26), f"update {update}, {told}", fill=(93, 104, 120, 255), font_size=12)
        pictures.append(picture)
    return pictures


def _encoded(pictures: list[Image.Image], kind: str) -> bytes:
    """An image file; of several pictures an animation that rests on the last."""
    file = io.BytesIO()
    if kind == "GIF":
        few = [picture.quantize(64, dither=Image.Dither.NONE) for picture in pictures]
        pause = [120] * (len(few) - 1) + [3000]
        few[0].save(file, "GIF", save_all=True, append_images=few[1:], duration=pause, loop=0)
    else:
        pictures[-1].save(file, kind)
    return file.getvalue()

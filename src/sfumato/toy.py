"""The two-dimensional study of the PCME++ paper: do learnt variances tell certain samples from ambiguous ones?

The samples themselves are the parameters; no network is trained. This part makes the data, optimises and draws. The losses
are the package's own.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sfumato.files import write_atomically
from sfumato.gaussian import GaussianEmbedding
from sfumato.losses.base import MatchLoss
from sfumato.losses.pcmepp import PCMEPPLoss
from sfumato.losses.triplet import TripletLoss
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
        epochs: number of epochs after which each of the frames was taken.
        frames: the embeddings then; the first is the start, the last the result.
    """

    certain: float | None
    uncertain: float | None
    epochs: list[int]
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
    epochs: int = 500,
    batch_size: int = 128,
    lr: float = 0.02,
) -> ToyRun:
    """Optimise means and log variances with Adam under one method; a pair matches when both drew the same class.

    Args:
        data: of :func:`toy_data`; left as it is.
        method: one of METHODS.
        generator: of the order of the samples and the classes of uncertain ones.
        epochs: passes over all samples.
        batch_size: samples a step; each is compared with all of them, itself included.
        lr: of the samples and of the loss's logits.

    Raises:
        ValueError: the method is unknown, or epochs is below 1.
    """
    if epochs < 1:
        raise ValueError(f"train_toy: epochs must be at least 1, got {epochs}")
    loss = _loss(method)
    mean = data.embedding.mean.clone().requires_grad_()
    log_var = data.embedding.log_var.clone().requires_grad_()
    optimiser = torch.optim.Adam([mean, log_var, *loss.parameters()], lr=lr)
    kept = {round(epochs * (k / _FRAMES) ** 2) for k in range(_FRAMES + 1)}  # Most of the movement comes early.
    frames = [data.embedding]
    with progress_bar(method, epochs) as advance:
        for epoch in range(1, epochs + 1):
            for batch in torch.randperm(len(mean), generator=generator).split(batch_size):
                other = (torch.rand(len(batch), generator=generator) < 0.5) & data.uncertain[batch]
                drawn = (data.label[batch] + other.long()) % CLASSES
                match = (drawn.unsqueeze(1) == drawn).to(mean.dtype)  # (b, b)
                samples = GaussianEmbedding(mean[batch], log_var[batch])
                optimiser.zero_grad(set_to_none=True)
                loss(samples, samples, match).total.backward()
                optimiser.step()
            if epoch in kept:
                frames.append(GaussianEmbedding(mean.detach().clone(), log_var.detach().clone()))
            advance(1)
    var = frames[-1].var
    has_variance = method in PUBLISHED_RATIO
    return ToyRun(
        certain=float(var[~data.uncertain].mean()) if has_variance else None,
        uncertain=float(var[data.uncertain].mean()) if has_variance else None,
        epochs=sorted(kept | {0}),
        frames=frames,
    )


def _loss(method: str) -> MatchLoss:
    if method in PUBLISHED_RATIO:
        return PCMEPPLoss(distance=method, alpha=0.0, beta=0.0)
    if method == "triplet_sum":
        return TripletLoss(mining="sum")
    if method == "triplet_hardest":
        return TripletLoss(mining="hardest")
    raise ValueError(f"train_toy: unknown method {method!r}; known: {', '.join(METHODS)}")


def run_toy(out: Path, *, seed: int = 0, epochs: int = 500, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Train with each method from the same start, and write a picture of the results and an animation of the learning.

    Args:
        out: folder for "toy.png" and "toy.gif"; made if it is not there.
        seed: of the samples and of each method's batches.
        epochs: passes over the samples; 500 in the paper.
        methods: some of METHODS.

    Returns:
        {"seed", "epochs", "ratio": {method: uncertain / certain}, "published_ratio", "certain", "uncertain": mean variances,
        "picture", "animation"}; null where a method has no variance.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = toy_data(torch.Generator().manual_seed(seed))
    runs = {
        method: train_toy(data, method, generator=torch.Generator().manual_seed(seed), epochs=epochs)
        for method in methods
    }
    pictures = _pictures(data, runs)
    write_atomically(out / "toy.png", _encoded(pictures[-1:], "PNG"))
    write_atomically(out / "toy.gif", _encoded(pictures, "GIF"))
    return {
        "seed": seed,
        "epochs": epochs,
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
    epochs = next(iter(runs.values())).epochs
    pictures = []
    for k, epoch in enumerate(epochs):
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
            draw.text((left + 10, 26), f"epoch {epoch}, {told}", fill=(93, 104, 120, 255), font_size=12)
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

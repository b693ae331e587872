"""The 2-D study of the PCME++ paper: do learnt variances distinguish certain samples from ambiguous ones?

The samples themselves are the parameters, so no network is trained. This module makes the data, optimises it with the
losses of the package, and draws the result.
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
"""The match loss with two distances, and triplet losses of points with all negatives and with the hardest one."""

PUBLISHED_RATIO = {"csd": 1.82, "wasserstein2": 1.04}
"""Mean variance of uncertain over that of certain samples, Chun 2024, A.2."""

READINGS: tuple[dict[str, Any], ...] = (
    {
        "as": "500 mini-batches, the default here",
        "updates": 500,
        "ratio": {"csd": "1.65 to 1.91", "wasserstein2": "1.02 to 1.09"},
    },
    {
        "as": "500 passes over the samples, both mini-batches of an update counted",
        "updates": 2930,
        "ratio": {"csd": "3.06 to 3.27", "wasserstein2": "1.05 to 1.06"},
    },
    {
        "as": "500 passes over the samples, one mini-batch of an update counted",
        "updates": 5860,
        "ratio": {"csd": "6.02 to 6.34", "wasserstein2": "1.22 to 1.25"},
    },
)
"""The paper's "500 epochs" in three readings, and the ratios over seeds 0 to 4. The first was chosen because it gives
the published ratios, see docs/decisions/studies.md."""

CLASSES, PER_CLASS, UNCERTAIN_PER_CLASS = 3, 500, 150

_FRAMES, _PANEL, _TITLE = 48, 340, 46
_COLOURS = ((214, 69, 65), (226, 168, 20), (46, 140, 87), (140, 86, 160), (70, 130, 200), (90, 90, 100))
"""Of certain samples of the three classes, then of those between classes 1-2, 2-3 and 3-1."""


@dataclass(frozen=True)
class ToyData:
    """The samples before training; n = 1500."""

    embedding: GaussianEmbedding  # (n, 2) means around the centroids, and log variances
    label: Tensor  # (n,) class 0, 1 or 2; for an uncertain sample the first of its two classes
    uncertain: Tensor


@dataclass(frozen=True)
class ToyRun:
    """The result of one method."""

    certain: float | None  # mean variance of the certain samples, over samples and both dimensions; None for points
    uncertain: float | None  # mean variance of the uncertain samples, likewise
    updates: list[int]  # number of updates after which each frame was taken
    frames: list[GaussianEmbedding]  # the embeddings after these updates, from the start to the result

    @property
    def ratio(self) -> float | None:
        """Variance of uncertain over certain samples; None for points, which have no variance."""
        return None if self.certain is None or self.uncertain is None else self.uncertain / self.certain


def toy_data(generator: torch.Generator) -> ToyData:
    """Make 1050 certain and 450 uncertain samples in two dimensions.

    The centroids are standard normal. The samples are normal around them with a standard deviation of 0.1, and log
    sigma of each dimension is uniform in [-1.5, 1.5].
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
    """Optimise means and log variances with Adam under one method.

    Every update compares two mini-batches without a common sample, like a batch of images with a batch of captions. A
    pair matches if both samples have the same class in this update.
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
    kept = {round(updates * (k / _FRAMES) ** 2) for k in range(_FRAMES + 1)}  # Most of the movement is early.
    frames = [data.embedding]
    with progress_bar(method, updates) as advance:
        for update in range(1, updates + 1):
            both = torch.randperm(len(mean), generator=generator)[: 2 * batch_size].view(2, -1)  # (2, b)
            other = (torch.rand(both.shape, generator=generator) < 0.5) & data.uncertain[both]
            chosen = (data.label[both] + other.long()) % CLASSES
            match = (chosen[0].unsqueeze(1) == chosen[1]).to(mean.dtype)  # (b, b)
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
    """Train with each method from the same start; write an image of the results and an animation."""
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
        "readings": list(READINGS),
        "picture": str(out / "toy.png"),
        "animation": str(out / "toy.gif"),
    }


def _pictures(data: ToyData, runs: dict[str, ToyRun]) -> list[Image.Image]:
    """One image per frame, with one panel per method; the radius of a dot grows with its standard deviation."""
    colour = torch.where(data.uncertain, data.label + CLASSES, data.label).tolist()
    order = data.uncertain.logical_not().sort(stable=True).indices.tolist()  # Uncertain samples are drawn first.
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
            caption = f"variance ratio {ratio:.2f}" if run.certain is not None else "points, no variance"
            draw.text((left + 10, 26), f"update {update}, {caption}", fill=(93, 104, 120, 255), font_size=12)
        pictures.append(picture)
    return pictures


def _encoded(pictures: list[Image.Image], kind: str) -> bytes:
    """An image file, or an animation that pauses on the last image."""
    file = io.BytesIO()
    if kind == "GIF":
        few = [picture.quantize(64, dither=Image.Dither.NONE) for picture in pictures]
        pause = [120] * (len(few) - 1) + [3000]
        few[0].save(file, "GIF", save_all=True, append_images=few[1:], duration=pause, loop=0)
    else:
        pictures[-1].save(file, kind)
    return file.getvalue()

"""Centres near which the items of a gallery lie, so that lifted vectors less their centre are short."""

import torch
from torch import Tensor

from sfumato.distances import Lift
from sfumato.gaussian import GaussianEmbedding


def lifted_vectors(gallery: GaussianEmbedding, lift: Lift) -> tuple[Tensor, Tensor | float]:
    """(m, e) lifted vectors without the columns that queries meet with zeros, and (m,) the squares of these."""
    columns = lift.query(gallery[:1])
    if columns.shape[1] and bool((columns != 0).any()):
        wide = gallery.to(torch.float64)
        return torch.cat([wide.mean, lift.gallery(wide)], dim=1), 0.0
    return gallery.mean, lift.gallery(gallery).square().sum(1)


def centres_of(gallery: GaussianEmbedding, lift: Lift) -> Tensor:
    """(c, e) centres: one, or up to 256 where these are much closer to the items."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(gallery.n, generator=generator)[: 2**14]
    points = lifted_vectors(gallery[chosen], lift)[0].float()
    centre = points[: 2**12].median(dim=0).values.unsqueeze(0)
    c = min(256, gallery.n // 128)
    if c < 2 or not points.abs().amax() < 1e15:
        return centre
    points = points - centre
    means = _k_means(points[: 64 * c], _seeds(points[: 2**11], c, generator))
    many = torch.linalg.vector_norm(points - means[nearest_centre(points, means)], dim=1).median()
    return centre + means if many < torch.linalg.vector_norm(points, dim=1).median() / 2 else centre


def _seeds(points: Tensor, c: int, generator: torch.Generator) -> Tensor:
    """Some of the points, each drawn by its squared distance to those before: as few of c as are nearly as close."""
    squares = points.square().sum(1)
    seeds, apart, medians = [0], torch.full((len(points),), torch.inf), list[float]()
    while True:
        seed = seeds[-1]
        apart = torch.minimum(apart, (squares + squares[seed] - 2 * (points @ points[seed])).clamp_min(0))
        apart[seed] = 0
        medians.append(float(apart.median()))
        if len(seeds) == c or not bool(apart.sum() > 0):
            break
        seeds.append(int(torch.multinomial(apart, 1, generator=generator)))
    enough = next(i for i, median in enumerate(medians, 1) if median <= 4 * medians[-1])
    return points[torch.tensor(seeds[: 2 * enough])]


def _k_means(points: Tensor, means: Tensor) -> Tensor:
    """(c, e) means after four rounds from the given ones."""
    for _ in range(4):
        label = nearest_centre(points, means)
        sums = torch.zeros_like(means).index_add_(0, label, points)
        counts = torch.bincount(label, minlength=len(means)).unsqueeze(1)
        means = torch.where(counts > 0, sums / counts.clamp_min(1), means)
    return means


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """(n,) positions of the nearest centres."""
    if len(centres) == 1:
        return torch.zeros(len(points), dtype=torch.long)
    middle = centres.mean(0)
    points, centres = points - middle, centres - middle
    return torch.addmm(centres.square().sum(1), points, centres.T, alpha=-2).argmin(1)

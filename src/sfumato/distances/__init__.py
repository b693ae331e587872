r"""Every distance between diagonal Gaussians, by name: DISTANCES. Smaller is closer, everywhere.

The formulas that separate into matrix products are in ``separable``; elk, bhattacharyya and the sampled ones, which are
computed in blocks under a memory budget, in ``blockwise``. Half precision in, float32 out. Formulas and sources are
also in docs/concepts/distances.md. A distance does not depend on labels, logits or probabilities.

To add a distance: its row form, its matrix form and an entry in DISTANCES; a slow loop in the tests' references; the
formula and its source in docs/concepts/distances.md.
"""

import difflib
import functools

from sfumato.distances.blockwise import (
    DEFAULT_MEMORY_MB,
    average_l2,
    average_l2_matrix,
    average_l2_of_samples,
    bhattacharyya,
    bhattacharyya_matrix,
    elk,
    elk_matrix,
    reduce_sample_distances,
    seeded_samples,
)
from sfumato.distances.distance import Distance, Lift
from sfumato.distances.separable import (
    CSD_LIFT,
    SQUARED_L2_LIFT,
    WASSERSTEIN2_LIFT,
    csd,
    csd_matrix,
    csd_vectors,
    js,
    js_matrix,
    kl,
    kl_matrix,
    kl_reversed,
    kl_reversed_matrix,
    min_kl,
    min_kl_matrix,
    nearest,
    nearest_matrix,
    squared_l2,
    squared_l2_matrix,
    squared_l2_vectors,
    wasserstein2,
    wasserstein2_matrix,
    wasserstein2_printed,
    wasserstein2_printed_matrix,
    wasserstein2_root,
    wasserstein2_root_matrix,
    wasserstein2_vectors,
)

DISTANCES: dict[str, Distance] = {
    distance.name: distance
    for distance in (
        Distance("csd", csd, csd_matrix, lift=CSD_LIFT, vectors=csd_vectors),
        Distance("squared_l2", squared_l2, squared_l2_matrix, lift=SQUARED_L2_LIFT, vectors=squared_l2_vectors),
        Distance(
            "wasserstein2",
            wasserstein2,
            wasserstein2_matrix,
            lift=WASSERSTEIN2_LIFT,
            vectors=wasserstein2_vectors,
        ),
        Distance("wasserstein2_root", wasserstein2_root, wasserstein2_root_matrix),
        Distance("wasserstein2_printed", wasserstein2_printed, wasserstein2_printed_matrix),
        Distance("kl", kl, kl_matrix, symmetric=False, needs_variance=True),
        Distance("kl_reversed", kl_reversed, kl_reversed_matrix, symmetric=False, needs_variance=True),
        Distance("min_kl", min_kl, min_kl_matrix, needs_variance=True),
        Distance("js", js, js_matrix, needs_variance=True),
        Distance("elk", elk, elk_matrix, needs_variance=True),
        Distance("bhattacharyya", bhattacharyya, bhattacharyya_matrix, needs_variance=True),
        Distance("average_l2", average_l2, average_l2_matrix, of_samples=average_l2_of_samples),
    )
}
"""Every distance by name; recipes and commands choose from these, or take nearest_of_K for items of K embeddings."""


def get_distance(name: str | Distance) -> Distance:
    """The distance of that name: one of DISTANCES, or nearest_of_2, nearest_of_3, ... (:func:`nearest_matrix`).

    Args:
        name: a name; a distance is returned unchanged.

    Returns:
        The distance, with images as its first argument.

    Raises:
        ValueError: the name is unknown; the message names the nearest and lists all.

    Example:
        >>> get_distance("nearest_of_3").embeddings
        3
    """
    if isinstance(name, Distance):
        return name
    count = name.removeprefix("nearest_of_")
    if count != name and count.isdecimal() and not count.startswith("0"):
        row, matrix = (functools.partial(form, embeddings=int(count)) for form in (nearest, nearest_matrix))
        return Distance(name, row, matrix, embeddings=int(count))
    if name not in DISTANCES:
        near = difflib.get_close_matches(name, DISTANCES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown distance {name!r}{hint} known: {', '.join(DISTANCES)}, nearest_of_K")
    return DISTANCES[name]


__all__ = [
    "DEFAULT_MEMORY_MB",
    "DISTANCES",
    "Distance",
    "Lift",
    "average_l2",
    "average_l2_matrix",
    "average_l2_of_samples",
    "bhattacharyya",
    "bhattacharyya_matrix",
    "csd",
    "csd_matrix",
    "elk",
    "elk_matrix",
    "get_distance",
    "js",
    "js_matrix",
    "kl",
    "kl_matrix",
    "kl_reversed",
    "kl_reversed_matrix",
    "min_kl",
    "min_kl_matrix",
    "nearest",
    "nearest_matrix",
    "reduce_sample_distances",
    "seeded_samples",
    "squared_l2",
    "squared_l2_matrix",
    "wasserstein2",
    "wasserstein2_matrix",
    "wasserstein2_printed",
    "wasserstein2_printed_matrix",
    "wasserstein2_root",
    "wasserstein2_root_matrix",
]

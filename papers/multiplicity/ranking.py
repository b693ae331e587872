"""How well a model finds, among COCO's images on disk, those that people found relevant for a caption."""

import re
from pathlib import Path

import numpy as np

from papers.multiplicity.data import Captions
from sfumato.distances import get_distance
from sfumato.errors import UserError, say
from sfumato.metrics.relevance import Relevance
from sfumato.models.embed import embed_folder, say_problems
from sfumato.models.run import load_model
from sfumato.search.exact import rank_relevant


def ranked(captions: Captions, model: str, folder: Path) -> dict[str, np.ndarray]:
    """{"p10_own", "rr_own": (n,)} precision at 10 and reciprocal rank; both are 0 without a relevant image on disk.

    The last number in a file's name is the id of its image. An image that nobody judged counts as irrelevant.
    """
    captions.check_relevant()
    loaded = load_model(model)
    images, names, problems = embed_folder(loaded, folder)
    say_problems(problems)
    place = {int(digits[-1]): i for i, name in enumerate(names) if (digits := re.findall(r"\d+", Path(name).stem))}
    found = [[place[image] for image in own if image in place] for own in captions.relevant or ()]
    n, on_disk = len(found), sum(map(bool, found))
    if not on_disk:
        raise UserError(f"{folder}: none of {len(names)} images is relevant for a caption; expected COCO's, NUMBER.jpg")
    say(f"{len(names)} images; {on_disk} of {n} captions have a relevant one among them")
    relevance = Relevance.from_lists(found, n_gallery=len(names))
    distance = get_distance(loaded.distance).for_direction("t2i")
    rank = rank_relevant(loaded.embed_texts(captions.texts).numpy(), images.numpy(), relevance, distance)
    first = np.full(n, np.inf)
    np.minimum.at(first, relevance.query_of_item, rank)
    return {"p10_own": np.bincount(relevance.query_of_item[rank < 10], minlength=n) / 10, "rr_own": 1 / (first + 1)}

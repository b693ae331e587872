"""Which probabilities hold in a gallery: training images attract queries, also those that look for another image."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sfumato.calibration.calibrator import Calibration
from sfumato.data.images import FileImage, Problems
from sfumato.data.sources import DataConfig
from sfumato.data.splits import WORDINGS
from sfumato.errors import UserError
from sfumato.models.calibrate import describe_calibration
from sfumato.models.embed import load_splits
from sfumato.models.model import Model
from sfumato.models.recipe import load_recipe
from sfumato.models.run import RECIPE, TRAINING_CALIBRATION, load_calibration
from sfumato.search.gallery import Gallery


def choose_calibration(model: Model, ids: Sequence[str], images: Mapping[str, str]) -> tuple[Calibration | None, int]:
    """The calibration of a gallery, and how many of its images trained the model.

    A run whose training left some texts out has two: one for images that it has not seen, and one for galleries in
    which at least half of the images are of the training.
    """
    folder, n_trained, fitted = Path(model.source), 0, None
    if images and any(True for _ in model.model.parameters()) and (folder / RECIPE).is_file():
        n_trained = _n_trained(load_recipe(folder / RECIPE).data, ids, images)
        fitted = load_calibration(folder, TRAINING_CALIBRATION)
    if fitted is not None and 2 * n_trained >= len(ids):
        return fitted, n_trained
    return model.calibration, n_trained


def _n_trained(config: DataConfig, ids: Sequence[str], images: Mapping[str, str]) -> int:
    """How many of the images are in the split train; 0 if the data are not there any more."""
    try:
        train = load_splits(config, Problems()).get("train")
    except UserError:
        return 0
    if train is None:
        return 0
    if "split" in images:
        return len(set(ids) & set(train.image_ids))
    files = {image.path.resolve() for image in train.images if isinstance(image, FileImage)}
    folder = Path(images["folder"])
    return sum((folder / i).resolve() in files for i in ids) if files else 0


def training_note(gallery: Gallery) -> str:
    """What the probabilities of a gallery with training images are worth."""
    n_trained, n, calibration = gallery.metadata.get("trained", 0), len(gallery), gallery.scorer.calibration
    if not n_trained or calibration is None:
        return ""
    which = "All images" if n_trained >= n else f"{n_trained:,} of the {n:,} images"
    if calibration.metadata.get("split") != WORDINGS:
        return (
            f"{which} trained the model, and the probabilities were fitted on images that training left out: here they"
            " are a rough guide. Train with data.held_out_wordings=0/5 for probabilities that hold in such a gallery"
        )
    found = describe_calibration(calibration)["t2i"]
    note = (
        f"{which} trained the model. The probabilities are for new captions of these: they were fitted on"
        f" {found['n_queries']:,} captions that training left out"
    )
    if (first := found.get("first_hit")) is not None:
        note += f", of which {first['rate']:.0%} find their image first (expected: {first['mean_probability']:.0%})"
    others = f". Captions of the other {n - n_trained:,} images find theirs much less often"
    return note if n_trained >= n else note + others

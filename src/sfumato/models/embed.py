"""Use of a run or a published model: embedding of folders, files and splits, and evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sfumato.calibration.calibrator import Calibration
from sfumato.data.images import FileImage, ImageSource
from sfumato.data.problems import Problems
from sfumato.data.sources import DataConfig
from sfumato.distances import get_distance
from sfumato.encoders.dual import DualEncoder
from sfumato.encoders.encoder_protocol import Item
from sfumato.errors import UserError
from sfumato.evaluation.embedded_input import EmbeddedSet
from sfumato.evaluation.ground_truth import ground_truth_from_data
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.models.embedding_steps import file_endings
from sfumato.models.process_group import ProcessGroup, alone
from sfumato.models.run import Run
from sfumato.models.splits import embed_split, load_split
from sfumato.progress import progress_bar


class RetrievalModel(Protocol):
    """A dual encoder with match probabilities: a :class:`~sfumato.models.run.Run` or a published model."""

    @property
    def model(self) -> DualEncoder:
        """Images and texts to Gaussians."""
        ...

    @property
    def distance(self) -> str:
        """Name of the distance between them."""
        ...

    @property
    def logit_scale(self) -> float:
        """Scale of the match logits."""
        ...

    @property
    def logit_bias(self) -> float:
        """Bias of the match logits."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether the logits were fitted on held-out pairs."""
        ...

    @property
    def calibration(self) -> Calibration | None:
        """Everything that was fitted on held-out pairs."""
        ...


def embed_folder(retrieval_model: RetrievalModel, folder: Path) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed every image below a folder; for a model that reads region features, every .npy file.

    Args:
        retrieval_model: the model.
        folder: searched with its subfolders.

    Returns:
        ((n, d) embeddings; n ids, paths relative to the folder, sorted; the items left out, with reasons).

    Raises:
        UserError: there is no such folder, or no usable image in it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    endings = file_endings(retrieval_model.model)
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in endings and p.is_file())
    if not paths:
        raise UserError(f"no images in {folder} (looked for {', '.join(sorted(endings))})")
    return embed_sources(
        retrieval_model, [FileImage(p) for p in paths], [p.relative_to(folder).as_posix() for p in paths]
    )


def embed_sources(
    retrieval_model: RetrievalModel, sources: Sequence[ImageSource], ids: Sequence[str]
) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed images; those that cannot be used are left out and reported.

    Args:
        retrieval_model: the model.
        sources: k images.
        ids: k ids.

    Returns:
        ((n, d) embeddings, their n ids, the items left out, with reasons).

    Raises:
        UserError: no image can be used.
    """
    problems = Problems()
    items: list[Item] = [source.read_bytes for source in sources]
    with progress_bar("reading images", len(items)) as advance:
        store, kept = retrieval_model.model.image.processor.read(
            items, progress=advance, on_error=lambda i, error: problems.add(sources[i].location, str(error))
        )
    if not len(kept):
        raise UserError(f"none of {len(items)} images can be used:\n{problems.summary()}")
    with progress_bar("embedding images", len(kept)) as advance:
        embeddings = retrieval_model.model.image.embed(store, progress=advance)
    return embeddings, [ids[i] for i in kept], problems


def embed_lines(retrieval_model: RetrievalModel, path: Path) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed the texts of a file.

    Args:
        retrieval_model: the model.
        path: see :func:`read_lines`.

    Returns:
        ((n, d) embeddings, n ids, the items left out).
    """
    texts, ids, problems = read_lines(path)
    return retrieval_model.model.embed_texts(texts), ids, problems


def read_lines(path: Path) -> tuple[list[str], list[str], Problems]:
    """Read the texts of a file, one on each line; empty lines are left out and reported.

    Args:
        path: a UTF-8 file.

    Returns:
        (texts, ids: line numbers from 1, the items left out).

    Raises:
        UserError: there is no such file, it is not UTF-8, or holds no text.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    problems, texts, ids = Problems(), [], []
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            texts.append(line.strip())
            ids.append(str(number))
        else:
            problems.add(f"{path}:{number}", "empty line")
    if not texts:
        raise UserError(f"{path} holds no text")
    return texts, ids, problems


def embed_split_images(
    retrieval_model: RetrievalModel, data: DataConfig, split: str
) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed the images of a split.

    Args:
        retrieval_model: the model.
        data: where the split comes from.
        split: its name.

    Returns:
        ((n, d) embeddings, n ids, the items left out).
    """
    problems = Problems()
    prepared = load_split(retrieval_model.model, data, split, problems)
    return retrieval_model.model.image.embed(prepared.images), list(prepared.data.image_ids), problems


def embed_for_evaluation(
    retrieval_model: RetrievalModel, data: DataConfig, split: str, *, process_group: ProcessGroup | None = None
) -> EmbeddedSet:
    """Embed a split of any data; its ground truth is named after the split.

    Args:
        retrieval_model: the model.
        data: where the split comes from.
        split: its name.
        process_group: the processes among which the work is divided; None for a single process.

    Returns:
        Embeddings and ground truth, complete in every process.
    """
    process_group = process_group or alone()
    prepared = load_split(retrieval_model.model, data, split, process_group=process_group)
    images, texts = embed_split(retrieval_model.model, prepared, process_group)
    ground_truth, kinds = ground_truth_from_data(prepared.data, name=split), prepared.data.text_kinds
    return EmbeddedSet(
        images, texts, ground_truth.image_ids, ground_truth.text_ids, (ground_truth,), tuple(kinds) if kinds else None
    )


def evaluate_model(
    retrieval_model: RetrievalModel,
    data: DataConfig,
    split: str,
    distance: str | None = None,
    *,
    process_group: ProcessGroup | None = None,
    embedded: EmbeddedSet | None = None,
) -> Evaluation:
    """Evaluate any model on a split of any data.

    Args:
        retrieval_model: the model.
        data: where the split comes from.
        split: its name.
        distance: distance for ranking; the model's distance if None.
        process_group: the processes among which the work is divided; None for a single process.
        embedded: of :func:`embed_for_evaluation`, if the split is embedded already.

    Returns:
        The figures, in every process.
    """
    process_group = process_group or alone()
    name = get_distance(distance or retrieval_model.distance).name
    embedded = embedded or embed_for_evaluation(retrieval_model, data, split, process_group=process_group)
    (ground_truth,) = embedded.ground_truths
    return evaluate_retrieval(
        embedded.images,
        embedded.texts,
        ground_truth.i2t,
        distance=name,
        text_kinds=embedded.text_kinds,
        rank=process_group.rank_relevant,
    )


def evaluate_run(
    run: Run,
    split: str,
    distance: str | None = None,
    *,
    process_group: ProcessGroup | None = None,
    embedded: EmbeddedSet | None = None,
) -> tuple[Evaluation, Path]:
    """Evaluate a run on a split of its data, and write the figures into its folder.

    Args:
        run, split, distance, process_group, embedded: see :func:`evaluate_model`; of several processes the first one
            writes.

    Returns:
        (the figures, the file evaluation-SPLIT-DISTANCE.json).
    """
    result = evaluate_model(run, run.recipe.data, split, distance, process_group=process_group, embedded=embedded)
    path = run.folder / f"evaluation-{split}-{result.distance}.json"
    if process_group is None or process_group.main:
        write_json(path, result.to_json())
    return result, path

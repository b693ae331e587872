"""Using a run: embedding folders and lines, building an index and searching it. What commands and the demo call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato.data.emoji import emoji_names
from sfumato.data.manifest import PICTURE_ENDINGS
from sfumato.data.pairs import FileImage, ImageSource
from sfumato.data.problems import Problems
from sfumato.distances import get_distance
from sfumato.encoders.dual import Item
from sfumato.errors import UserError
from sfumato.evaluation.protocols import Evaluation, evaluate_retrieval
from sfumato.files import write_json
from sfumato.gaussian import GaussianEmbedding
from sfumato.matching import match_probability
from sfumato.progress import progress_bar
from sfumato.search.index import GaussianIndex
from sfumato.training.loop import embed_split, load_split
from sfumato.training.run import Run, load_run


def embed_folder(run: Run, folder: Path) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed every picture below a folder.

    Returns:
        (embeddings, ids: paths relative to the folder, sorted; what was left out and why).

    Raises:
        UserError: there is no such folder, or no usable picture in it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in PICTURE_ENDINGS and p.is_file())
    if not paths:
        raise UserError(f"no pictures in {folder} (looked for {', '.join(sorted(PICTURE_ENDINGS))})")
    return embed_sources(run, [FileImage(p) for p in paths], [p.relative_to(folder).as_posix() for p in paths])


def embed_sources(
    run: Run, sources: Sequence[ImageSource], ids: Sequence[str]
) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed pictures; those that cannot be used are left out and reported."""
    problems = Problems()
    items: list[Item] = [source.read_bytes for source in sources]
    with progress_bar("reading pictures", len(items)) as advance:
        store, kept = run.model.image.reader.read(
            items, progress=advance, on_error=lambda i, error: problems.add(sources[i].place, str(error))
        )
    if not len(kept):
        raise UserError(f"none of {len(items)} pictures can be used:\n{problems.summary()}")
    with progress_bar("embedding pictures", len(kept)) as advance:
        embeddings = run.model.image.embed(store, progress=advance)
    return embeddings, [ids[i] for i in kept], problems


def embed_lines(run: Run, path: Path) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed a text file line by line; ids are line numbers from 1; empty lines are left out and reported."""
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
    return run.model.embed_texts(texts), ids, problems


def embed_split_images(run: Run, split: str) -> tuple[GaussianEmbedding, list[str], Problems]:
    """Embed the pictures of a split of the run's data."""
    problems = Problems()
    prepared = load_split(run, split, problems)
    return run.model.image.embed(prepared.images), list(prepared.data.image_ids), problems


def evaluate_run(run: Run, split: str, distance: str | None = None) -> tuple[Evaluation, Path]:
    """Evaluate a split of the run's data by its own distance or another, and write the figures into its folder.

    Returns:
        (the figures, the file evaluation-SPLIT-DISTANCE.json).
    """
    name = get_distance(distance).name if distance else run.loss.distance.name
    prepared = load_split(run, split)
    relevance, kinds = prepared.data.relevance(), prepared.data.text_kinds
    result = evaluate_retrieval(*embed_split(run.model, prepared), relevance, distance=name, text_kinds=kinds)
    path = run.folder / f"evaluation-{split}-{name}.json"
    write_json(path, result.to_json())
    return result, path


def build_index(run: Run, embeddings: GaussianEmbedding, ids: Sequence[str], *, engine: str = "exact") -> GaussianIndex:
    """An index that knows the run's distance, its calibrated logits and where the run is."""
    payload = {}
    if run.recipe.data.source == "emoji" and all("/" in i for i in ids):
        names = emoji_names()
        payload["label"] = [names.get(i.split("/")[0], "") for i in ids]
    return GaussianIndex.build(
        embeddings,
        ids,
        distance=run.loss.distance.name,
        engine=engine,
        logit_scale=run.logit_scale,
        logit_bias=run.logit_bias,
        queries_first=False,
        payload=payload,
        about={"run": str(run.folder.resolve()), "calibrated": run.calibrated},
    )


def search_index(
    folder: Path, texts: Sequence[str], pictures: Sequence[Path], *, k: int, run: Path | None = None
) -> list[dict[str, Any]]:
    """Search a saved index by texts and pictures with the run that it was built from.

    Returns:
        For each query :func:`describe`'s dictionary, texts first.
    """
    index = GaussianIndex.load(folder)
    home = run or Path(str(index.about.get("run", "")))
    if not (home / "recipe.toml").is_file():
        raise UserError(f"the run that {folder} was built with is not at {home}; say where it is with --run FOLDER")
    loaded = load_run(home)
    results = []
    if texts:
        results += describe(index, list(texts), loaded.model.embed_texts(texts), k)
    for path in pictures:
        if not path.is_file():
            raise UserError(f"there is no picture {path}")
        try:
            query = loaded.model.embed_images([path.read_bytes()])
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
        # The logits were fitted on pairs of a picture and a text: between pictures they are a guess.
        results += [result | {"calibrated": False} for result in describe(index, [str(path)], query, k)]
    return results


def describe(index: GaussianIndex, names: Sequence[str], queries: GaussianEmbedding, k: int) -> list[dict[str, Any]]:
    """Search and say how sure the answer is.

    Returns:
        For each query {"query", "distance" (its name), "calibrated" (whether the probabilities were fitted on held-out pairs),
        "uncertainty" (total variance), "expected_matches" (sum of the match probabilities over the whole index), "hits": [{"id", "distance", "match_probability", "uncertainty", and the payload}]}.
    """
    results = []
    for name, query, hits, expected in zip(
        names, queries.total_variance.tolist(), index.search(queries, k), expected_matches(index, queries), strict=True
    ):
        found = [
            {
                "id": h.id,
                "distance": h.distance,
                "match_probability": h.match_probability,
                "uncertainty": h.uncertainty,
                **h.payload,
            }
            for h in hits
        ]
        results.append(
            {
                "query": name,
                "distance": index.distance,
                "calibrated": bool(index.about.get("calibrated")),
                "uncertainty": query,
                "expected_matches": expected,
                "hits": found,
            }
        )
    return results


def expected_matches(index: GaussianIndex, queries: GaussianEmbedding) -> list[float]:
    """Sum over the index of the match probabilities of each query: how many of its items should match."""
    from sfumato.search.ranking import distance_blocks

    totals: list[float] = []
    for _, block in distance_blocks(queries, index.embeddings, index.distance, queries_first=index.queries_first):
        totals += match_probability(block, index.logit_scale, index.logit_bias).sum(1).tolist()
    return totals

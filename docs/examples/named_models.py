# %% [markdown]
# # Models by name
#
# Adopts models by their names, measures each on held-out pairs, and writes a small JSON file for each. Weights are
# downloaded: a network is needed, and the extras `backbones` and `open-clip`. `PAIRS` is a manifest of images and
# captions with splits: "val" calibrates, "test" measures. A model that cannot be loaded is named and left out.

# %%
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import sfumato
from sfumato.models.embed import embed_split, prepare_split, read_split
from sfumato.models.model import model_digest

MODELS = [
    "openai/clip-vit-base-patch32",
    "google/siglip2-base-patch16-224",
    "hf-hub:timm/MobileCLIP2-S0-OpenCLIP",
    "open_clip:xlm-roberta-base-ViT-B-32/laion5b_s13b_b90k",  # multilingual
    "hf-hub:timm/ViT-B-16-SigLIP-i18n-256",  # multilingual
    "small",  # of the package, to compare with
]
PAIRS, OUT, QUERY = "pairs.jsonl", Path("named-models"), "a red circle"

# %% [markdown]
# ## Adopt
#
# The order of hits is the model's own; what is fitted are probabilities. `adopt` makes texts lower-case for SigLIP, as
# in its training, and does not read its sigmoid: that is about pairs, and not about the hits of a gallery.


# %%
def plain(name):
    """The name of its folder and file."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name if Path(name).exists() else name)


def embedded(model, data, split):
    """(n, d) means of images, (m, d) means of texts, and the data without what cannot be read."""
    prepared = prepare_split(model, data, sfumato.Problems(), split)
    return *(side.mean for side in embed_split(model, prepared)), prepared.data


def adopt(name, folder):
    """The adopted model. `small` has heads of its own, so it is adopted by its means."""
    if name != "small":
        return sfumato.adopt_encoders(name, PAIRS, folder)
    model, images, texts, rows = sfumato.load(name).model, [], [], ["image,text,split"]
    for split, data in sfumato.read_manifest(PAIRS, sfumato.Problems()).items():
        of_images, of_texts, data = embedded(model, data, split)
        rows += [f"{len(images) + image},{len(texts) + text},{split}" for image, text in data.pairs]
        images += [*of_images]
        texts += [*of_texts]
    Path(OUT, "small.csv").write_text("\n".join(rows), encoding="utf-8")
    return sfumato.adopt(np.stack(images), np.stack(texts), OUT / "small.csv", folder)


def hits(run, split, most=100):
    """Cosines, matches and queries: of every text its nearest images."""
    images, texts, data = embedded(run.model, read_split(run.recipe.data, split, sfumato.Problems()), split)
    cosine, match = texts @ images.T, data.relevance().to_dense().T
    best = np.argsort(-cosine, axis=1)[:, :most]
    of_hits = (np.take_along_axis(values, best, 1).ravel() for values in (cosine, match))
    return *of_hits, np.repeat(np.arange(len(best)), best.shape[1])


# %% [markdown]
# ## Measure
#
# The file of a model is that of a `ScoreCalibrator` as well, fitted on its cosines: `ScoreCalibrator(prior=FILE)`
# starts from it. `digest` is of the weights and settings. What was not measured is null, with the reason.


# %%
def figures(found):
    """The probabilities of first hits, of each direction."""
    kept = ("n", "n_gallery", "rate", "mean_probability", "ece", "ece_by_chance", "log_loss")
    first = {one.direction: one for one in found if one.hits == 1}
    return {
        way: {key: round(getattr(one, key), 4) for key in kept} | {"verdict": one.verdict} for way, one in first.items()
    }


def measure(name):
    """Adopt a model and write its file."""
    made, file = adopt(name, OUT / plain(name)), OUT / f"{plain(name)}.json"
    calibrator, test = sfumato.ScoreCalibrator(prior="cosine"), hits(made.run, "test")
    guess = -calibrator.score(*test)
    calibrator.fit(*hits(made.run, "val")).save(file)
    recalls = made.retrieval
    about = {
        "name": plain(name) if Path(name).exists() else name,
        "date": f"{datetime.date.today()}",
        "sfumato": sfumato.__version__,
        "digest": model_digest(sfumato.load(name).model if name == "small" else made.run.model),
        "n_images": made.n_images,
        "n_texts": made.n_texts,
        "test": {
            "n_images": recalls.n_images,
            "n_texts": recalls.n_texts,
            "rsum": round(100 * recalls.rsum, 2),
            "t2i recall@1": round(recalls.t2i["recall@1"], 4),
            "i2t recall@1": round(recalls.i2t["recall@1"], 4),
        },
        "listed": {"method": made.method, **{kind: figures(found) for kind, found in made.hits.items()}},
        "cosines": {"log_loss": round(-calibrator.score(*test), 4), "log_loss of prior": round(guess, 4)},
        "fits": None,
        "own sigmoid": None,
        "referee": None,
        "unmeasured": {
            "fits": "needs verdicts of people: sfumato calibrate INDEX --judgements FILE",
            "own sigmoid": "of SigLIP; adopt does not read it",
            "referee": "python -m papers referee RUN, in a checkout",
        },
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | about, indent=1), encoding="utf-8")
    return about


OUT.mkdir(exist_ok=True)
measured = {}
for name in MODELS:
    try:
        measured[name] = measure(name)
    except sfumato.errors.UserError as error:
        print(f"{name}: left out, {str(error).splitlines()[0]}")
if not measured:
    sys.exit('no model could be loaded; `pip install "sfumato[backbones,open-clip]"`, and give the network or folders')

# %%
for about in measured.values():
    test, listed = about["test"], about["listed"]["served"]["t2i"]
    recalls = f"RSUM {test['rsum']:.1f}, t2i R@1 {test['t2i recall@1']:.3f} of {test['n_texts']} texts"
    print(f"{about['name']}: {recalls}; first hits {listed['mean_probability']:.2f}, right {listed['rate']:.2f}")

# %% [markdown]
# ## Use
#
# The folder of an adopted model is a run: index and search with it.

# %%
run, index = OUT / plain(next(iter(measured))), OUT / "index"
command = [sys.executable, "-m", "sfumato", "index", str(run), "--split", "all", "--out", str(index)]
print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
answer = sfumato.load_index(index).search(QUERY, k=3)
print(answer.verdict)
answer

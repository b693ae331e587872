"""Zero-shot CLIP, the rows CLIP ZS of PCME++'s table 1: adopted, and scored by COCO's protocol."""

import json
from functools import partial

import torch
from PIL import Image
from support import tiny_models
from torch.nn.functional import normalize


def test_an_adopted_clip_has_the_recall_of_its_cosines(tmp_path, sfumato, monkeypatch):
    """A COCO of 80 images with five captions each, and a tiny CLIP, against transformers and a loop."""
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_models, "teach", partial(tiny_models.teach, steps=60))
    manifest, entries = tiny_models.two_colours(tmp_path, 80), []
    tiny_models.taught_clip(tmp_path / "model", manifest)
    for i, line in enumerate(manifest.read_text().splitlines()):
        image, caption = json.loads(line).values()
        sentences = [{"sentid": 5 * i + k, "raw": f"{caption} {7 * k}"} for k in range(5)]
        name, split = f"COCO_val2014_{i:012d}.png", ("train", "val", "test", "test")[i // 20]
        (tmp_path / image).rename(tmp_path / name)
        entries.append({"filename": name, "split": split, "sentences": sentences})
    coco = tmp_path / "dataset_coco.json"
    coco.write_text(json.dumps({"images": entries}))
    sfumato.printed("adopt", tmp_path / "model", "--data", coco, "--out", tmp_path / "run")
    wanted = "--benchmark", "coco", "--annotations", coco
    found = sfumato.json("evaluate", "run", tmp_path / "run", *wanted)["truths"]["coco_5k"]

    import transformers

    parts = transformers.CLIPModel, transformers.AutoImageProcessor, transformers.AutoTokenizer
    model, processor, tokenizer = (part.from_pretrained(tmp_path / "model") for part in parts)
    images = [Image.open(tmp_path / entry["filename"]).convert("RGB") for entry in entries[40:]]
    captions = [sentence["raw"] for entry in entries[40:] for sentence in entry["sentences"]]
    tokens = tokenizer(captions, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        both = model(**tokens, **processor(images, return_tensors="pt"))
    cosine = normalize(both.image_embeds, dim=1) @ normalize(both.text_embeds, dim=1).T
    right = {"i2t": [int(row.argmax()) // 5 == i for i, row in enumerate(cosine)]}
    right["t2i"] = [int(row.argmax()) == t // 5 for t, row in enumerate(cosine.T)]
    for side, hits in right.items():
        assert found[side]["recall@1"] == sum(hits) / len(hits) and 0 < sum(hits) < len(hits)

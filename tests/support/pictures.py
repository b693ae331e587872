"""Image files and tar archives of a few bytes, made on the spot."""

import io
import tarfile

import numpy as np
from PIL import Image


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


png = lambda colour="red", size=(8, 8): encoded(Image.new("RGB", size, colour))
noise = lambda width, height, seed=0: np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_tar(path, members, mode="w", **options):
    with tarfile.open(path, mode, **options) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)

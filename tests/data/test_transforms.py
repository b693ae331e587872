"""Pictures: every mode against values worked by hand, damaged files by their message, augmentation by what it must keep."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.transforms import MAX_PIXELS, augment, decode_image

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def encode(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def hwc(data, size=None):
    return decode_image(data, size).transpose(1, 2, 0)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_rgb_is_kept(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    decoded = decode_image(encode(Image.fromarray(PIXELS), kind, **options), None)
    assert decoded.shape == (3, 5, 7) and decoded.dtype == np.uint8 and decoded.flags.c_contiguous
    assert np.array_equal(decoded.transpose(1, 2, 0), PIXELS)


def test_grey_black_and_white_and_palette():
    grey = PIXELS[..., 0]
    assert np.array_equal(hwc(encode(Image.fromarray(grey))), np.repeat(grey[..., None], 3, 2))
    bits = Image.fromarray(grey > 127)
    assert bits.mode == "1"
    assert np.array_equal(hwc(encode(bits)), np.repeat(np.where(grey > 127, 255, 0)[..., None], 3, 2))
    palette = Image.fromarray(PIXELS).quantize(16)
    assert palette.mode == "P"
    for kind in ("PNG", "GIF"):
        assert np.array_equal(hwc(encode(palette, kind)), np.asarray(palette.convert("RGB")))


def test_transparency_lies_on_white():
    alpha = np.random.default_rng(1).integers(0, 256, (5, 7, 1), dtype=np.uint8)
    alpha[0], alpha[1] = 0, 255
    expected = (PIXELS * (alpha / 255.0) + 255 * (1 - alpha / 255.0)).round()
    decoded = hwc(encode(Image.fromarray(np.concatenate([PIXELS, alpha], 2))))
    assert abs(decoded - expected).max() <= 1
    assert (decoded[0] == 255).all() and np.array_equal(decoded[1], PIXELS[1])
    la = hwc(encode(Image.fromarray(np.concatenate([PIXELS[..., :1], alpha], 2), "LA")))
    assert abs(la - expected[..., :1]).max() <= 1


def test_a_transparent_colour_of_a_palette_or_of_rgb_is_white():
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([200, 10, 10, 10, 20, 30])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert hwc(encode(palette, kind, transparency=0)).tolist() == [[[255, 255, 255], [10, 20, 30]]]
    rgb = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert hwc(encode(rgb, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind):
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert hwc(encode(Image.fromarray(values), kind))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_float_grey_is_scaled_by_its_maximum_and_survives_nan():
    values = np.array([[0.0, 0.5, 2.0, np.nan, -1.0]], dtype=np.float32)
    assert hwc(encode(Image.fromarray(values), "TIFF"))[0, :, 2].tolist() == [0, 63, 255, 0, 0]
    assert hwc(encode(Image.fromarray(np.zeros((1, 2), np.float32)), "TIFF")).max() == 0


def test_cmyk_jpeg():
    decoded = hwc(encode(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95))
    assert abs(decoded.astype(int) - [0, 255, 255]).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    # The stored picture is what the camera saw; numpy turns it upright by the definition of each value.
    upright = {
        **{1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1]},
        **{5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).swapaxes(0, 1)},
        8: lambda a: np.rot90(a),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = upright[orientation](PIXELS)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        assert np.array_equal(hwc(encode(Image.fromarray(PIXELS), kind, exif=exif, **options)), expected)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_picture_with_damaged_exif_is_still_read():
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI4s", 9, 0x0112, 99, 7, b"\xff" * 4)
    for damaged in (exif, b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        for kind in ("JPEG", "PNG", "WEBP"):
            decoded = hwc(encode(Image.new("RGB", (16, 8), "red"), kind, exif=damaged))
            assert decoded.shape == (8, 16, 3) and decoded[..., 0].min() > 240


def test_resized_to_a_square():
    tall = Image.fromarray(np.concatenate([np.zeros((40, 20, 3), np.uint8), np.full((40, 20, 3), 255, np.uint8)]))
    small = decode_image(encode(tall), 16)
    assert small.shape == (3, 16, 16)
    assert small[:, :7].max() < 10 and small[:, 9:].min() > 245
    same = Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    assert np.array_equal(hwc(encode(same), 16), np.asarray(same))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_files_cut_short_are_refused(kind):
    whole = encode(Image.fromarray(np.random.default_rng(2).integers(0, 256, (32, 32, 3), dtype=np.uint8)), kind)
    decode_image(whole, 16)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(ValueError):
            decode_image(whole[: int(len(whole) * share)], 16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"<html><body>404 Not Found</body></html>", "not a picture in one of the formats PNG, JPEG, WEBP"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "not a picture|cannot be decoded"),
        # Would start Ghostscript if it were let through to pillow.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", "not a picture in one of"),
    ],
)
def test_what_is_no_picture(data, message):
    with pytest.raises(ValueError, match=message):
        decode_image(data, 16)


@pytest.mark.parametrize(("width", "height"), [(MAX_PIXELS // 1000 + 1, 1000), (40000, 40000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    with pytest.raises(ValueError, match="limit of 80000000"):
        decode_image(bomb, 16)


@pytest.mark.filterwarnings("ignore")
def test_whatever_bytes_change_only_value_error_comes_out():
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 256, (12, 12, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "a thing", (72, 1)
    whole = [encode(picture, k, exif=exif) for k in ("PNG", "JPEG", "WEBP", "TIFF")]
    whole += [encode(picture, "GIF"), encode(picture, "BMP"), encode(picture.convert("CMYK"), "JPEG")]
    source, refused = random.Random(0), 0
    for k in range(3000):
        data = bytearray(whole[k % len(whole)])
        for _ in range(source.choice((1, 2, 8))):
            data[int(len(data) * source.random() ** 2)] = source.choice((0, 1, 255, source.randrange(256)))
        try:
            assert decode_image(bytes(data), 8).shape == (3, 8, 8)
        except ValueError:
            refused += 1
    assert 100 < refused < 2900


def test_augmentation_is_bounded_different_for_each_and_the_same_for_a_seed():
    pixels = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels[1:] = pixels[0]
    before = pixels.clone()
    a = augment(pixels, generator=torch.Generator().manual_seed(3))
    assert a.shape == (6, 3, 20, 20) and a.dtype == torch.float32 and a.min() >= 0 and a.max() <= 1
    assert torch.equal(a, augment(pixels, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(a, augment(pixels, generator=torch.Generator().manual_seed(4)))
    assert all(not torch.equal(a[i], a[j]) for i in range(6) for j in range(i))
    assert torch.equal(pixels, before)


def test_augmentation_keeps_the_thing_in_sight():
    pixels = torch.full((200, 3, 32, 32), 255, dtype=torch.uint8)
    pixels[:, :, 12:20, 12:20] = 0
    light = augment(pixels, generator=torch.Generator().manual_seed(0)).mean(1)
    # The dark square stays within the picture, and stays darker than the corner, whatever the background became.
    assert (light.flatten(1).amin(1) + 0.1 < light[:, 0, 0]).float().mean() > 0.95

"""What is read of image files: bytes, modes, sizes, crops and augmentation; what is damaged, cut or a bomb."""

import io
import random
import struct
import sys
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from support import pictures
from support.photographs import dng, halves, heic, saved, write_video
from support.pictures import encoded
from support.raising import raises

from sfumato.data import image_decoding, transforms
from sfumato.data.image_decoding import MAX_PIXELS, check_image, decode_image, is_cut, needs_extra, still_bytes
from sfumato.data.images import FileImage, FolderImages, Problems, image_files
from sfumato.data.photographs import describe_image

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
hwc = lambda data, size=None: decode_image(data, size).transpose(1, 2, 0)


def turned(orientation=6):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def test_every_mode_is_what_it_shows():
    grey = PIXELS[..., 0]
    bits, palette = Image.fromarray(grey > 127), Image.fromarray(PIXELS).quantize(16)
    assert (bits.mode, palette.mode) == ("1", "P")
    assert np.array_equal(hwc(encoded(Image.fromarray(grey))), np.repeat(grey[..., None], 3, 2))
    assert np.array_equal(hwc(encoded(bits)), np.repeat(np.where(grey > 127, 255, 0)[..., None], 3, 2))
    two = Image.new("P", (2, 1), 0)
    two.putpalette([200, 10, 10, 10, 20, 30])
    two.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert np.array_equal(hwc(encoded(palette, kind)), np.asarray(palette.convert("RGB")))
        assert hwc(encoded(two, kind, transparency=0)).tolist() == [[[255, 255, 255], [10, 20, 30]]]
    rgb = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert hwc(encoded(rgb, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]
    alpha = np.random.default_rng(1).integers(0, 256, (5, 7, 1), dtype=np.uint8)  # Transparency lies on white.
    alpha[0], alpha[1] = 0, 255
    expected = (PIXELS * (alpha / 255.0) + 255 * (1 - alpha / 255.0)).round()
    decoded = hwc(encoded(Image.fromarray(np.concatenate([PIXELS, alpha], 2))))
    assert abs(decoded - expected).max() <= 1
    assert (decoded[0] == 255).all() and np.array_equal(decoded[1], PIXELS[1])
    la = hwc(encoded(Image.fromarray(np.concatenate([PIXELS[..., :1], alpha], 2), "LA")))
    assert abs(la - expected[..., :1]).max() <= 1
    # Grey of 16 bits is scaled, not clipped; that of floats by its maximum, and it survives nan.
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        assert hwc(encoded(Image.fromarray(values), kind))[0, :, 0].tolist() == [0, 1, 128, 255]
    values = np.array([[0.0, 0.5, 2.0, np.nan, -1.0]], dtype=np.float32)
    assert hwc(encoded(Image.fromarray(values), "TIFF"))[0, :, 2].tolist() == [0, 63, 255, 0, 0]
    assert hwc(encoded(Image.fromarray(np.zeros((1, 2), np.float32)), "TIFF")).max() == 0
    decoded = hwc(encoded(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95))
    assert abs(decoded.astype(int) - [0, 255, 255]).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    upright = {  # The stored picture is what the camera saw; numpy turns it upright by the definition of each value.
        **{1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1]},
        **{5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).swapaxes(0, 1)},
        8: lambda a: np.rot90(a),
    }
    assert np.array_equal(hwc(encoded(Image.fromarray(PIXELS), "BMP")), PIXELS)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        file = encoded(Image.fromarray(PIXELS), kind, exif=turned(orientation), **options)
        decoded = decode_image(file, None)
        assert decoded.dtype == np.uint8 and decoded.flags.c_contiguous
        assert np.array_equal(decoded.transpose(1, 2, 0), upright[orientation](PIXELS))
        if kind != "TIFF":
            assert np.array_equal(decode_image(file, None, upright=False).transpose(1, 2, 0), PIXELS)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_files_cut_short_and_what_is_no_picture_are_refused_and_damaged_exif_is_read():
    for kind in ("PNG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = encoded(noise(32, 32), kind)
        decode_image(whole, 16)
        for fraction in (0.1, 0.5, 0.9):
            raises(ValueError, ".", decode_image, whole[: int(len(whole) * fraction)], 16)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"  # Would start Ghostscript.
    for data, message in (
        (b"", "the file is empty"),
        (b"<html><body>404 Not Found</body></html>", "not an image in one of the formats PNG, JPEG, WEBP"),
        (eps, "not an image in one of"),
    ):
        raises(ValueError, message, decode_image, data, 16)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI4s", 9, 0x0112, 99, 7, b"\xff" * 4)
    for damaged in (exif, b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        for kind in ("JPEG", "PNG", "WEBP"):
            decoded = hwc(encoded(Image.new("RGB", (16, 8), "red"), kind, exif=damaged))
            assert decoded.shape == (8, 16, 3) and decoded[..., 0].min() > 240


@pytest.mark.parametrize(("width", "height"), [(MAX_PIXELS // 1000 + 1, 1000), (40000, 40000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(width, height):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    raises(ValueError, "limit of 80000000", decode_image, bomb, 16)


noise = lambda width, height: Image.fromarray(pictures.noise(width, height))


def photograph(width, height, quality=90, **options):
    small = noise(width // 40, height // 40).resize((width, height), Image.Resampling.BICUBIC)
    return encoded(small, "JPEG", quality=quality, **options)


@pytest.mark.parametrize(("kind", "width"), [("PNG", 150), ("JPEG", 150), ("JPEG", 2000)])
def test_squash_is_what_it_was_when_caches_were_filled(kind, width):
    data = photograph(width, 1200) if width == 2000 else encoded(noise(width, 90), kind)
    with Image.open(io.BytesIO(data)) as picture:
        expected = np.asarray(picture.resize((24, 24), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(decode_image(data, 24), expected)
    assert np.array_equal(decode_image(data, 24, fit="squash", crop=None), expected)
    assert not np.array_equal(decode_image(data, 24, fit="crop"), expected)


@pytest.mark.slow
def test_fit_crop_is_the_clip_processor_of_transformers():
    module = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    different = []
    for size in (32, 33):
        sizes = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
        processor = module.CLIPImageProcessorPil(**sizes, do_rescale=False, do_normalize=False)
        for shape in ((50, 50), (32, 32), (91, 60), (60, 91), (20, 33), (33, 20), (500, 333), (3, 400), (32, 47)):
            picture = noise(*shape)
            found = decode_image(encoded(picture), size, fit="crop")
            different += [] if np.array_equal(found, processor(picture)["pixel_values"][0]) else [(size, shape)]
    assert not different


@pytest.mark.parametrize(("longer", "start"), [(10, 0), (11, 0), (12, 1), (13, 2), (14, 2), (15, 2), (17, 4)])
def test_the_nearest_crop_starts_where_torchvision_and_open_clip_start(longer, start):
    """int(round((longer - 10) / 2.0)) by hand: Python rounds a half to the even neighbour."""
    columns = np.repeat(np.arange(longer, dtype=np.uint8)[None], 10, 0)[..., None].repeat(3, 2)
    for picture in (columns, columns.transpose(1, 0, 2)):
        square = decode_image(encoded(Image.fromarray(np.ascontiguousarray(picture))), 10, fit="crop-nearest")
        assert square.min() == start and square.max() == start + 9
    assert decode_image(encoded(Image.fromarray(columns)), 10, fit="crop").min() == (longer - 10) // 2


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_crop_is_cut_in_whole_pixels_of_the_upright_picture_before_resizing(fit):
    stored = noise(90, 60)
    upright = np.rot90(np.asarray(stored), -1)
    # 60 x 90: left 0.1 -> 6, right 0.81 -> 48.6 -> 49, top 0.25 -> 22.5 -> 22 (to even), bottom 0.75 -> 67.5 -> 68.
    part = encoded(Image.fromarray(np.ascontiguousarray(upright[22:68, 6:49])))
    for size in (None, 20):
        got = decode_image(encoded(stored, exif=turned()), size, fit=fit, crop=(0.1, 0.25, 0.71, 0.5))
        assert np.array_equal(got, decode_image(part, size, fit=fit))


def test_crops_of_everything_of_almost_nothing_from_outside_and_of_a_large_jpeg_at_a_reduced_size():
    data = encoded(noise(7, 5))
    assert np.array_equal(decode_image(data, None, crop=(0, 0, 1, 1)), decode_image(data, None))
    assert decode_image(data, None, crop=(0.999, 0.999, 0.001, 0.001)).shape == (3, 1, 1)
    assert np.array_equal(decode_image(data, None, crop=(0, 0, 1e-9, 1e-9)), decode_image(data, None)[:, :1, :1])
    for box in ((-0.1, 0, 0.5, 0.5), (0, 0.6, 0.5, 0.5), (0, 0, 0, 0.5), (0, 0, float("nan"), 1)):
        raises(ValueError, "crop must be .* in fractions of the image", decode_image, data, 8, crop=box)
    data, seen = encoded(Image.new("RGB", (40, 20)), exif=turned()), []
    whole = lambda aspect: seen.append(aspect) or (0.0, 0.0, 1.0, 1.0)
    decode_image(data, 8, crop=whole)
    decode_image(data, 8, crop=whole, upright=False)
    assert seen == [0.5, 2.0]
    # Its longer side resized in full would be 6 gigabytes. Grey grows by 1 every 500 pixels; the middle is at 100.
    line = (np.arange(100_000) // 500).astype(np.uint8)[None].repeat(3, 0).T[None]
    for picture in (line, line.transpose(1, 0, 2)):
        square = decode_image(encoded(Image.fromarray(np.ascontiguousarray(picture))), 224, fit="crop")
        assert square.shape == (3, 224, 224) and square.min() >= 99 and square.max() <= 100
    data, box = photograph(2000, 1200, exif=turned()), (0.13, 0.27, 0.61, 0.67)
    whole = decode_image(data, None)
    assert np.array_equal(decode_image(data, None, crop=(0, 0, 1, 1)), whole)
    height, width = whole.shape[1:]
    left, top = round(0.13 * width), round(0.27 * height)
    right, bottom = round(0.74 * width), round(0.94 * height)
    for fit in ("squash", "crop"):
        expected = decode_image(encoded(Image.fromarray(whole.transpose(1, 2, 0)[top:bottom, left:right])), 64, fit=fit)
        difference = abs(decode_image(data, 64, fit=fit, crop=box).astype(int) - expected)
        assert 0 < difference.mean() < 0.5 and difference.max() <= 6
        moved = decode_image(data, 64, fit=fit, crop=(0.15, *box[1:]))
        assert abs(moved.astype(int) - expected).mean() > 1


def outcome(function, *arguments, **options):
    try:
        found = function(*arguments, **options)
    except ValueError as error:
        return str(error)
    assert found is None or found.shape == (3, 8, 8)
    return "good"


@pytest.mark.filterwarnings("ignore")
def test_check_image_says_what_decode_image_says():
    exif = turned()
    exif[0x010E], exif[0x011A] = "a thing", (72, 1)
    picture = noise(40, 50)
    whole = [encoded(picture, kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]
    whole += [encoded(picture, "JPEG", progressive=True), encoded(picture.convert("CMYK"), "JPEG")]
    whole += [encoded(picture, "GIF"), encoded(picture, "BMP"), encoded(picture, "TIFF", compression="tiff_lzw")]
    whole += [encoded(picture.quantize(16), transparency=0), encoded(picture.convert("RGBA"))]
    # Loaded, but not converted: premultiplied alpha is pillow's mode La, which it cannot turn into RGB.
    premultiplied = bytearray(encoded(Image.new("LA", (4, 4)), "TIFF"))
    kind_of_alpha = premultiplied.index(struct.pack("<HHI", 338, 3, 1)) + 8
    assert premultiplied[kind_of_alpha] == 2
    check_image(bytes(premultiplied))
    premultiplied[kind_of_alpha] = 1
    whole += [b"", b"<html>", encoded(Image.new("1", (40000, 3000))), bytes(premultiplied)]
    source, outcomes = random.Random(0), []
    for k in range(600):
        data = bytearray(whole[k % len(whole)])
        if k >= len(whole) and source.random() < 0.3:
            data = data[: int(len(data) * source.random())]
        for _ in range(source.choice((1, 2, 8)) if k >= len(whole) and data else 0):
            data[int(len(data) * source.random() ** 2)] = source.choice((0, 1, 255, source.randrange(256)))
        outcomes.append(outcome(decode_image, bytes(data), 8))
        assert outcome(check_image, bytes(data)) == outcomes[-1], f"{k}: {bytes(data[:40])!r}"
    n = len(whole) - 4
    assert outcomes[:n] == ["good"] * n and "good" not in outcomes[n : n + 4]
    assert 60 < sum(o != "good" for o in outcomes) < 540


def test_a_margin_is_left_out_as_by_resizing_to_256_and_cutting_out_224():
    for width, height in ((300, 200), (200, 300), (500, 333), (640, 480), (260, 256)):
        image = Image.fromarray(np.random.default_rng(5).integers(0, 255, (height, width, 3), dtype=np.uint8))
        short = min(width, height)
        resized = image.resize((int(256 * width / short), int(256 * height / short)), Image.Resampling.BICUBIC)
        left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
        expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
        np.testing.assert_array_equal(decode_image(encoded(image), 224, fit="crop-margin"), expected)
    assert decode_image(encoded(Image.new("RGB", (60_000, 1))), 224, fit="crop-margin").shape == (3, 224, 224)


@pytest.mark.parametrize("aspect", [1.0, 0.6, 8.0])
def test_resized_crops_have_the_area_and_the_aspects_of_imagenet(aspect):
    random = np.random.default_rng(0)
    boxes = np.array([transforms.resized_crop_box(random, aspect) for _ in range(4000)])
    left, top, width, height = boxes.T
    assert (boxes >= 0).all() and (left + width <= 1 + 1e-12).all() and (top + height <= 1 + 1e-12).all()
    area, shape = width * height, aspect * width / height
    assert (shape > 3 / 4 - 1e-9).all() and (shape < 4 / 3 + 1e-9).all() and (area > 0.08 - 1e-9).all()
    if aspect == 1:  # Large areas of a long shape do not fit; below 3/4 every sample does.
        small = area[area < 0.7]
        assert np.histogram(small, 5, (0.08, 0.7))[0].min() > 0.15 * len(small)  # 1/5 each; 10 deviations away
        assert abs(np.log(shape[area < 0.7]).mean()) < 0.02
    if aspect == 8:  # 8/3 % of such an image is a third of its width: most samples do not fit, and the centre is cut.
        centre = np.isclose(height, 1) & np.isclose(width, 4 / 3 / 8)
        assert centre.mean() > 0.1 and np.allclose(left[centre], (1 - width[centre]) / 2)


def test_random_crop_boxes_are_uniform_and_inside_and_augmentation_is_bounded_and_seeded():
    random = np.random.default_rng(0)
    boxes = np.array([transforms.random_crop_box(random) for _ in range(4000)])
    left, top, width, height = boxes.T
    for side, start in ((width, left), (height, top)):
        assert side.min() >= 0.6 and side.max() <= 1 and start.min() >= 0 and (start + side).max() <= 1
        # Mean and variance of the uniform distribution on [0.6, 1], and of a place uniform in the rest; z < 4.
        assert abs(side.mean() - 0.8) < 4 * 0.4 / (12 * 4000) ** 0.5
        assert abs(side.var() / (0.4**2 / 12) - 1) < 0.1
        place = start / (1 - side)
        assert abs(place.mean() - 0.5) < 4 / (12 * 4000) ** 0.5
    assert abs(np.corrcoef(boxes.T[2:])[0, 1]) < 4 / 4000**0.5
    assert transforms.random_crop_box(np.random.default_rng(3)) == transforms.random_crop_box(np.random.default_rng(3))
    assert transforms.random_crop_box(random, 1.0) == (0, 0, 1, 1)
    generator = lambda seed: torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8, generator=generator(0))
    pixels[1:] = pixels[0]
    before = pixels.clone()
    a = transforms.augment(pixels, generator=generator(3))
    assert a.shape == (6, 3, 20, 20) and a.dtype == torch.float32 and a.min() >= 0 and a.max() <= 1
    assert torch.equal(a, transforms.augment(pixels, generator=generator(3))) and torch.equal(pixels, before)
    assert not torch.equal(a, transforms.augment(pixels, generator=generator(4)))
    assert all(not torch.equal(a[i], a[j]) for i in range(6) for j in range(i))
    pixels = torch.full((200, 3, 32, 32), 255, dtype=torch.uint8)
    pixels[:, :, 12:20, 12:20] = 0
    light = transforms.augment(pixels, generator=generator(0)).mean(1)
    # The dark square stays within the picture, and darker than the corner, whatever the background became.
    assert (light.flatten(1).amin(1) + 0.1 < light[:, 0, 0]).float().mean() > 0.95


def test_crop_and_mirror_shows_a_straight_part_of_the_picture():
    # Red grows to the right and green downwards: every pixel tells where it was, the centre of x at (x + 0.5) / 64.
    ramp = torch.arange(64, dtype=torch.uint8)
    pixels = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.zeros(64, 64, dtype=torch.uint8)])
    drawn = transforms.crop_and_mirror(pixels.expand(300, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (300, 3, 64, 64) and drawn.dtype == torch.float32
    place = (drawn[:, :2] * 255 + 0.5) / 64
    across, down = place[:, 0, 32, :], place[:, 1, :, 32]
    for line, other in ((across, place[:, 0, 3, :]), (down, place[:, 1, :, 60])):
        torch.testing.assert_close(line, other)
        fraction = (line[:, 48] - line[:, 16]) * 64 / 32
        assert fraction.abs().min() > 0.59 and fraction.abs().max() < 1.01 and fraction.abs().std() > 0.1
        assert (line[:, 48] - line[:, 32] - (line[:, 32] - line[:, 16])).abs().max() < 1e-4
        assert line.min() >= 0.5 / 64 - 1e-6 and line.max() <= 63.5 / 64 + 1e-6
    assert 110 < int((across[:, 48] < across[:, 16]).sum()) < 190 and (down[:, 48] > down[:, 16]).all()
    whole = (
        transforms.crop_and_mirror(pixels.expand(20, 3, 64, 64), generator=torch.Generator().manual_seed(0), low=1.0)
        * 255
    )
    square = pixels.float()
    same = [(w - square).abs().max() < 1e-3 for w in whole]
    mirrored = [(w - square.flip(-1)).abs().max() < 1e-3 for w in whole]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and any(same) and any(mirrored)


def test_erasing_leaves_one_rectangle_of_the_stated_area_and_aspect_in_the_stated_share():
    pixels = torch.full((600, 3, 60, 90), 255, dtype=torch.uint8)
    erase = lambda pixels, fraction: transforms.erase_rectangles(
        pixels, fraction=fraction, generator=torch.Generator().manual_seed(0)
    )
    erased = erase(pixels, 0.2)
    assert erased.dtype == torch.float32 and pixels.eq(255).all()
    changed = erased.ne(1).any(1)
    hit = changed.flatten(1).any(1)
    assert 0.15 < hit.float().mean() < 0.25  # Standard deviation 0.016.
    fractions = []
    for picture, inside in zip(erased[hit], changed[hit], strict=True):
        rows, columns = inside.any(1).nonzero().flatten(), inside.any(0).nonzero().flatten()
        assert inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].sum() == inside.sum(), "a rectangle"
        assert inside.sum() == len(rows) * len(columns)
        torch.testing.assert_close(
            picture[:, inside].T, torch.tensor(transforms.IMAGENET_MEAN).expand(int(inside.sum()), 3)
        )
        fractions.append(inside.float().mean().item())
        # Fractions of the sides, as those of a square picture; half a pixel of either side may be lost.
        height, width = len(rows) / 60, len(columns) / 90
        if height < 0.99 and width < 0.99:
            assert 0.3 * 0.75 < height / width < 1 / 0.3 / 0.75
    assert 0.01 < min(fractions) < 0.06 and 0.28 < max(fractions) < 0.35
    tops = changed[hit].any(2).int().argmax(1)
    assert tops.min() == 0 and tops.max() > 40, "anywhere"
    few = torch.rand(20, 3, 16, 16)
    assert torch.equal(erase(few, 0), few) and torch.equal(once := erase(few, 1), erase(few, 1))
    assert once.ne(few).flatten(1).any(1).all()


def is_halves(data: bytes, size: int = 64) -> bool:
    pixels = decode_image(data, size).astype(int)
    (red, _, blue), (red_right, _, blue_right) = pixels[:, size // 2, 4], pixels[:, size // 2, -5]
    return red > blue + 100 and blue_right > red_right + 100


def test_large_jpegs_those_of_several_pictures_heic_and_avif_are_decoded(monkeypatch, tmp_path):
    monkeypatch.setattr(image_decoding, "_QUARTERED", 100_000)
    assert is_halves(saved("JPEG")) and decode_image(saved("JPEG"), None).shape == (3, 120, 160)
    assert decode_image(saved("PNG"), None).shape == (3, 480, 640)
    monkeypatch.setattr(image_decoding, "_MAX_JPEG", 300_000)
    with pytest.raises(ValueError, match="more than the limit"), image_decoding.opened_image(saved("JPEG"), 300_000):
        pass
    data = saved("MPO", save_all=True, append_images=[Image.new("RGB", (640, 480))])
    assert is_halves(data) and decode_image(data, 64).dtype == np.uint8
    pytest.importorskip("pillow_heif", reason="needs the extra heif")
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    for name, data in (("a.heic", heic()), ("b.avif", saved("AVIF"))):
        (tmp_path / name).write_bytes(data)
        assert FileImage(tmp_path / name).read_bytes() == data and is_halves(data)


@pytest.mark.parametrize("preview", ["none", "large", "small"])
def test_raw_is_read_by_its_preview_or_developed(preview, tmp_path):
    pytest.importorskip("rawpy", reason="needs the extra raw")
    jpeg = {"none": b"", "large": saved("JPEG"), "small": saved("JPEG", halves((160, 120)))}[preview]
    (tmp_path / "a.dng").write_bytes(dng(jpeg))
    data = still_bytes(tmp_path / "a.dng")
    assert is_halves(data)
    assert decode_image(data, None).shape == ((3, 480, 640) if preview == "large" else (3, 240, 320))
    assert describe_image(data) == {"date": "2024-06-13T12:01:09", "camera": "Canon EOS 5D"}


@pytest.mark.parametrize("ending", ["mp4", "mov", "avi", "mkv"])
def test_a_video_is_its_first_frame(ending, tmp_path):
    pytest.importorskip("av", reason="needs the extra video")
    told = {"com.apple.quicktime.creationdate": "2024-06-13T12:01:09+0200", "com.apple.quicktime.make": "Apple"}
    write_video(tmp_path / f"clip.{ending}", **told)
    data = FolderImages(tmp_path).read(f"clip.{ending}", {})
    assert data is not None and is_halves(data)
    assert describe_image(data) == ({"date": "2024-06-13T12:01:09", "camera": "Apple"} if ending == "mov" else {})
    for text in (  # Lists of files and sessions, which would have the decoder open others, or the network.
        f"ffconcat version 1.0\nfile clip.{ending}\n", f"#EXTM3U\n#EXTINF:1,\nclip.{ending}\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    ):  # fmt: skip
        (tmp_path / f"list.{ending}").write_text(text)
        began = time.monotonic()
        raises(ValueError, "cannot be decoded", still_bytes, tmp_path / f"list.{ending}")
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["bad.cr2", "bad.mp4", "bad.heic", "empty.mov", "empty.nef"])
def test_a_damaged_file_has_one_clear_line(name, tmp_path):
    (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"\0\0\0\x1cftypheic" + b"abc" * 50)
    expected = "the file is empty" if name.startswith("empty") else "cannot be decoded|not an image"
    with pytest.raises(ValueError, match=expected) as error:
        decode_image(still_bytes(tmp_path / name), None)
    assert "\n" not in str(error.value)
    assert FolderImages(tmp_path).read(name, {}) is None or name == "bad.heic"


def test_without_the_extra_a_file_is_named_with_the_extra_to_install(monkeypatch, tmp_path):
    for module in ("pillow_heif", "rawpy", "av"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    assert needs_extra("A/B.JPG") == "" and not needs_extra("a.avif")
    for name, extra in (("a.HEIC", "heif"), ("a.Cr2", "raw"), ("clip.mov", "video")):
        assert needs_extra(name) == f'needs the extra {extra}: pip install "sfumato[{extra}]"'
    (tmp_path / "clip.mov").write_bytes(b"x")
    raises(ValueError, r'needs the extra video: pip install "sfumato\[video\]"', still_bytes, tmp_path / "clip.mov")
    raises(ValueError, "needs the extra heif", decode_image, b"\0\0\0\x1cftypheic\0\0\0\0", None)
    for name in ("a/1.heic", "a/2.heic", "a/3.heic", "b.jpg", "c.dng"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    problems = Problems()
    assert image_files(tmp_path, problems) == ["b.jpg"]
    lines = problems.summary().splitlines()
    assert len(problems) == 0 and problems.left_out == 5 and len(lines) == 3
    assert any("and 2 more: needs the extra heif" in line for line in lines)
    problems.check(1, 0.0)  # These files stop no run.
    problems.write(tmp_path / "problems.jsonl")
    assert len((tmp_path / "problems.jsonl").read_text().splitlines()) == 5


def test_a_folder_is_searched_without_hidden_files_and_the_moving_part_of_live_photos(monkeypatch, tmp_path):
    monkeypatch.setattr(image_decoding, "needs_extra", lambda name: "")
    monkeypatch.setattr("sfumato.data.images.needs_extra", lambda name: "")
    names = [
        "IMG_1.HEIC", "IMG_1.MOV", "IMG_2.jpg", "img_2.mov", "clip.mov", "b/IMG_1.mov", "a.txt", "._IMG_1.HEIC",
        ".hidden/a.jpg", "@eaDir/a.jpg", "b/.thumbnails/a.jpg", "notes.pdf", "Z.PNG",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "b" / "nas").symlink_to("/")
    kept = ["IMG_1.HEIC", "IMG_2.jpg", "Z.PNG", "b/IMG_1.mov", "clip.mov"]
    problems = Problems()
    assert image_files(tmp_path, problems) == image_files(tmp_path) == kept
    link, live, others = problems.summary().splitlines()
    assert "Live Photo" in live and "nas: a link to a folder elsewhere" in link
    assert "6 files not looked at: hidden 4, " in others and ".pdf 1" in others
    assert image_files(tmp_path, endings=frozenset({".pdf"})) == ["notes.pdf"]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame_that_is_not_one_colour(format):
    black, dark = Image.new("RGB", (640, 480)), Image.new("RGB", (640, 480), (20, 20, 20))
    assert is_halves(saved(format, black, save_all=True, append_images=[dark, halves((640, 480)), dark], duration=50))
    assert decode_image(saved(format, black, save_all=True, append_images=[dark], duration=50), 8).max() < 30


@pytest.mark.parametrize(("colour", "ground"), [("white", 0), ("#fffff0", 0), ("black", 255), ("yellow", 255)])
def test_a_drawing_stands_out_from_what_is_put_behind_it(colour, ground):
    drawing = Image.new("RGBA", (64, 64))
    drawing.paste(Image.new("RGBA", (20, 20), colour), (20, 20))
    for image in (drawing, drawing.quantize()):
        pixels = decode_image(saved("PNG", image), None)
        assert (pixels[:, 0, 0] == ground).all() and np.ptp(pixels, axis=(1, 2)).max() > 200


@pytest.mark.parametrize(("format", "progressive"), [("JPEG", False), ("JPEG", True), ("MPO", False)])
@pytest.mark.parametrize("kept", [-10, -2, -1, 0.7])
def test_a_cut_jpeg_is_read_as_far_as_it_goes(format, progressive, kept):
    exif = Image.Exif()
    exif[270] = "\xff\xd9"  # An end marker that ends nothing.
    whole = saved(format, Image.effect_noise((640, 64), 50).convert("RGB"), progressive=progressive, exif=exif)
    cut = whole[: kept if isinstance(kept, int) else int(kept * len(whole))]
    assert is_cut(cut) and not is_cut(whole) and not is_cut(whole + b"\xff\xda trailer") and not is_cut(b"")
    assert np.abs(decode_image(cut, None)[:, :24].astype(int) - decode_image(whole, None)[:, :24]).mean() < 25

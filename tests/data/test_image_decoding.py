"""Every kind of file that a folder of photographs holds: what is read of it, and what is said where an extra lacks."""

import sys
import time

import numpy as np
import pytest
from PIL import Image
from support.photographs import dng, halves, heic, saved, write_video
from support.raising import raises

from sfumato.data import image_decoding
from sfumato.data.image_decoding import decode_image, is_cut, needs_extra, still_bytes
from sfumato.data.images import FileImage, FolderImages, Problems, image_files
from sfumato.data.photographs import describe_image


def is_halves(data: bytes, size: int = 64) -> bool:
    pixels = decode_image(data, size).astype(int)
    (red, _, blue), (red_right, _, blue_right) = pixels[:, size // 2, 4], pixels[:, size // 2, -5]
    return red > blue + 100 and blue_right > red_right + 100


def test_a_jpeg_of_several_pictures_is_its_first_and_heic_and_avif_are_decoded(monkeypatch, tmp_path):
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
        assert needs_extra(name) == f"needs the extra {extra}: pip install 'sfumato[{extra}]'"
    (tmp_path / "clip.mov").write_bytes(b"x")
    raises(ValueError, r"needs the extra video: pip install 'sfumato\[video\]'", still_bytes, tmp_path / "clip.mov")
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
    noise = Image.effect_noise((640, 64), 50).convert("RGB")
    whole = saved(format, noise, progressive=progressive, exif=exif)
    cut = whole[: kept if isinstance(kept, int) else int(kept * len(whole))]
    assert is_cut(cut) and not is_cut(whole) and not is_cut(whole + b"\xff\xda trailer") and not is_cut(b"")
    near = np.abs(decode_image(cut, None)[:, :24].astype(int) - decode_image(whole, None)[:, :24])
    assert near.mean() < 25


def test_a_large_jpeg_is_read_at_a_quarter(monkeypatch):
    monkeypatch.setattr(image_decoding, "_QUARTERED", 100_000)
    assert is_halves(saved("JPEG")) and decode_image(saved("JPEG"), None).shape == (3, 120, 160)
    assert decode_image(saved("PNG"), None).shape == (3, 480, 640)
    monkeypatch.setattr(image_decoding, "_MAX_JPEG", 300_000)
    with pytest.raises(ValueError, match="more than the limit"), image_decoding.opened_image(saved("JPEG"), 300_000):
        pass

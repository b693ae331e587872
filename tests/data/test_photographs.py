"""The fields of a photograph, from metadata that other code wrote and from the files beside it."""

import json
import os
import random
import sys

import pytest
from PIL import ExifTags, Image
from support.photographs import iptc, saved

from sfumato.data.images import Problems
from sfumato.data.photographs import LENGTH, LINES, describe_image, file_fields, names_in, sidecars

XMP = """<?xpacket begin="" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:exif="http://ns.adobe.com/exif/1.0/"
 xmlns:photoshop="http://ns.adobe.com/photoshop/1.0/" photoshop:City="Zürich" exif:DateTimeOriginal="2019-05-04T10:11">
<dc:description><rdf:Alt><rdf:li xml:lang="x-default">A market by the river</rdf:li></rdf:Alt></dc:description>
<dc:title><rdf:Alt><rdf:li xml:lang="x-default">Market</rdf:li></rdf:Alt></dc:title>
<dc:subject><rdf:Bag><rdf:li>market</rdf:li><rdf:li>river</rdf:li></rdf:Bag></dc:subject>
<photoshop:Country>Switzerland</photoshop:Country></rdf:Description></rdf:RDF></x:xmpmeta>
<?xpacket end="w"?>""".encode()


def exif(inner: dict | None = None, **fields) -> Image.Exif:
    written = Image.Exif()
    for name, value in fields.items():
        written[{"XPTitle": 0x9C9B, "XPComment": 0x9C9C, "XPKeywords": 0x9C9E}.get(name) or ExifTags.Base[name]] = value
    if inner:
        written.get_ifd(ExifTags.IFD.Exif).update(inner)
    return written


def jpeg(segment: bytes = b"", **options) -> bytes:
    data = saved("JPEG", Image.new("RGB", (8, 8)), **options)
    return data[:2] + segment + data[2:]


def test_exif_iptc_and_xmp_in_any_format():
    data = jpeg(exif=exif(
        {ExifTags.Base.DateTimeOriginal: "2024:06:13 12:01:09"}, DateTime="2025:01:01 00:00:00",
        Make="NIKON CORPORATION", Model="NIKON D750", ImageDescription="Zwei Hunde im Schnee über Nacht".encode(),
        XPTitle="Winter".encode("utf-16-le"),
        XPKeywords="dog;snow; dog\0".encode("utf-16-le"), XPComment="A walk\r\nwith Bo\0\0".encode("utf-16-le"),
    ))  # fmt: skip
    assert describe_image(data) == {
        "captions": "Zwei Hunde im Schnee über Nacht\nA walk with Bo", "title": "Winter", "tags": "dog\nsnow",
        "date": "2024-06-13T12:01:09", "camera": "NIKON D750",
    }  # fmt: skip
    records = iptc((120, "Two dogs"), (5, "Dogs"), (25, "dog"), (25, "winter"), (55, "20240613"), (60, "120109+0200"))
    expected = {"captions": "Two dogs", "title": "Dogs", "tags": "dog\nwinter", "date": "2024-06-13T12:01:09"}
    assert describe_image(jpeg(records)) == expected
    assert describe_image(jpeg(iptc((90, "Paris"), (101, "France")))) == {"place": "Paris, France", "country": "France"}
    of_xmp = {
        "captions": "A market by the river", "title": "Market", "tags": "market\nriver", "date": "2019-05-04T10:11:00",
        "place": "Zürich, Switzerland", "country": "Switzerland",
    }  # fmt: skip
    small = Image.new("RGB", (8, 8))
    for format in ("JPEG", "WEBP", "AVIF"):
        assert describe_image(saved(format, small, xmp=XMP)) == of_xmp, format
    both = describe_image(jpeg(records, xmp=XMP))  # What stands twice is said once.
    assert both["tags"] == "market\nriver\ndog\nwinter"
    for make, model, expected in (
        ("Canon", "Canon EOS 5D", "Canon EOS 5D"), ("Apple", "iPhone 15", "Apple iPhone 15"),
        ("OLYMPUS IMAGING CORP.  ", "E-M1", "OLYMPUS E-M1"), ("EASTMAN KODAK COMPANY", "KODAK Z740", "KODAK Z740"),
        ("SONY", "", "SONY"), ("", "X100", "X100"), ("Panasonic\0", "DMC-LX3\0\0", "Panasonic DMC-LX3"),
    ):  # fmt: skip
        assert describe_image(jpeg(exif=exif(Make=make, Model=model)))["camera"] == expected
    for text in ("OLYMPUS DIGITAL CAMERA         ", "SONY DSC", "DSC_0012.JPG", "<Digimax S500>", " "):
        assert "captions" not in describe_image(jpeg(exif=exif(ImageDescription=text)))
    for text in ("0000:00:00 00:00:00", "    :  :     :  :  ", "2024:13:45 00:00:00", "yesterday"):
        assert "date" not in describe_image(jpeg(exif=exif(DateTime=text)))
    found = describe_image(jpeg(iptc(*[(25, f"tag{i:04}") for i in range(500)], (120, "long " * 1000))))
    assert len(found["tags"].split("\n")) == LINES and len(found["captions"]) == LENGTH


def test_a_position_has_the_names_of_its_place(monkeypatch, tmp_path):
    pytest.importorskip("reverse_geocode", reason="reverse_geocode is not installed")

    def of(latitude, longitude):
        written, tag = exif(), ExifTags.GPS
        written.get_ifd(ExifTags.IFD.GPSInfo).update({
            tag.GPSLatitudeRef: "NS"[latitude < 0], tag.GPSLatitude: (abs(latitude), 30.0, 0.0),
            tag.GPSLongitudeRef: "EW"[longitude < 0], tag.GPSLongitude: (abs(longitude), 0.0, 0.0),
        })  # fmt: skip
        return describe_image(jpeg(exif=written))

    assert of(43.0, 11.0)["country"] == "Italy" and "Tuscany" in of(43.0, 11.0)["place"]  # 43° 30' north
    assert of(-33.0, -71.0)["country"] == "Chile" and of(0.0, -30.0) == {}, "the sea has no place"
    (tmp_path / "a.json").write_text(json.dumps({"geoData": {"latitude": 41.9, "longitude": 12.5}}))
    assert file_fields(tmp_path, "a.jpg", b"", ["a.json"], Problems().remark)["place"] == "Rome, Lazio, Italy"
    monkeypatch.setitem(sys.modules, "reverse_geocode", None)
    assert of(43.0, 11.0) == {}


@pytest.mark.filterwarnings("ignore")
def test_damaged_metadata_are_none_and_never_an_error():
    whole = jpeg(iptc((120, "Two dogs")), exif=exif(Model="X100"), xmp=XMP)
    draw = random.Random(0)
    for _ in range(300):
        broken = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(20)):
            broken[draw.randrange(len(broken))] = draw.randrange(256) if broken else 0
        assert all(isinstance(text, str) and "\0" not in text for text in describe_image(bytes(broken)).values())
    assert describe_image(b"") == describe_image(b"no image") == {}
    bomb = XMP.replace(b"<x:xmpmeta", b'<!DOCTYPE a [<!ENTITY b "c">]><x:xmpmeta')
    assert describe_image(jpeg(xmp=bomb)) == {}


def fields_of(root, path, data, problems):
    beside = sidecars((root / path).name, names_in((root / path).parent))
    return file_fields(root, path, data, beside, problems.remark)


def test_the_fields_and_the_name_of_a_file(tmp_path):
    folder = tmp_path / "Italy 2019" / "100CANON"
    folder.mkdir(parents=True)
    (folder / "sunset_beach.jpg").write_bytes(data := jpeg(iptc((120, "Evening"))))
    (folder / "sunset_beach.txt").write_text("a beach\n\n  two people \n")
    (folder / "sunset_beach.xmp").write_bytes(XMP)
    (folder / "sunset_beach.jpg.json").write_text(json.dumps({
        "title": "sunset_beach.jpg", "description": "With Ada", "people": [{"name": "Ada"}],
        "photoTakenTime": {"timestamp": "1560427269"},
    }))  # fmt: skip
    problems = Problems()
    assert fields_of(tmp_path, "Italy 2019/100CANON/sunset_beach.jpg", data, problems) == {
        "captions": "a beach\ntwo people\nA market by the river\nWith Ada\nEvening", "title": "Market",
        "tags": "market\nriver\nAda", "date": "2019-05-04T10:11:00", "place": "Zürich, Switzerland",
        "country": "Switzerland", "name": "Italy 2019 sunset beach", "folder": "Italy 2019/100CANON",
    }  # fmt: skip
    assert not problems.left_out
    assert fields_of(tmp_path, "IMG_1234.jpg", jpeg(), problems) == {"file": "IMG 1234 jpg"}
    for path in (
        "IMG_1234.jpg", "DSC_0001.jpg", "PXL_20210101_123.jpg", "WhatsApp Image 2020-01-01.jpg",
        "1000268201_693b08cb0e.jpg", "3f2b8c1e-0d4a-4c5e-9b7f-aaaabbbbcccc.jpg", "deadbeefcafe.png",
    ):  # fmt: skip
        assert "name" not in file_fields(tmp_path, path, b"", (), Problems().remark)
    for path, name in (
        ("BeachSunset2019.jpg", "Beach Sunset"), ("dog in the snow (2).jpg", "dog in the snow"), ("猫.jpg", "猫"),
        ("Rome/Rome-Forum_03.jpg", "Rome Forum"), ("train2017/data/home/train.jpg", "train"),
        ("Train Trip/val/images/cat.jpg", "Train Trip cat"), ("dog1.jpg", "dog"), ("2018-06 Rome/3.jpg", "2018 Rome"),
        ("Christmas 2019.jpg", "Christmas 2019"), ("2019-06-01 fountain.jpg", "fountain"),
    ):  # fmt: skip
        assert file_fields(tmp_path, path, b"", (), Problems().remark)["name"] == name
    assert file_fields(tmp_path, "a dog/garden/cat.jpg", b"", (), Problems().remark, 1)["name"] == "garden cat"


LONG, PXL = "Screenshot_20230412-093015_Messenger_long_na", "PXL_20230412_093015123.MP"


def test_the_files_beside_an_image(tmp_path):
    for number, (image, beside) in enumerate([
        ("CAPS.JPG", "CAPS.TXT"), ("a.jpg", "A.Xmp"), ("a.jpg", "a.jpg.XMP"), ("a.jpg", "a.JPG.json"),
        ("a(1).JPG", "a.JPG.supplemental-metadata(1).json"), ("a(2).jpg", "a.jpg(2).json"), ("a.jpg", "a.json"),
        ("a b.jpg", "a b.supplemental-metadata.json"), (f"{LONG}.jpg", f"{LONG}.s.json"),
        (f"{LONG}me.jpg", f"{LONG}me.json"), (f"{LONG}mes.jpg", f"{LONG}me.json"),
        (f"{LONG}mes(1).jpg", f"{LONG}me(1).json"), (f"{PXL}-edited.jpg", f"{PXL}.jpg.supplemental-met.json"),
        ("a-bearbeitet(1).jpg", "a.jpg.supplemental-metadata(1).json"), ("Mu\u0308ller.jpg", "M\u00fcller.txt"),
    ]):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        for name in (beside, "other.jpg.json", f"{LONG}.txt.bak"):
            (folder / name).touch()
        assert sidecars(image, names_in(folder)) == [beside]


@pytest.mark.parametrize("kind", ["pipe", "zero", "elsewhere", "cycle", "large", "not UTF-8"])
def test_what_cannot_be_read_beside_an_image_is_remarked_and_stops_nothing(kind, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("private")
    path = tmp_path / "in" / "a.txt"
    path.parent.mkdir()
    monkeypatch.setattr("sfumato.data.photographs.MAX_SIDECAR", 5)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("large", "not UTF-8"):
        path.write_bytes(b"123456" if kind == "large" else b"\xff\xfe\xff")
    else:
        path.symlink_to({"zero": "/dev/zero", "elsewhere": "../secret", "cycle": "a.txt"}[kind])
    problems = Problems()
    (path.parent / "a.jpg.json").write_text("{")
    assert fields_of(path.parent, "a.jpg", jpeg(), problems) == {}
    assert len(problems.remarks) == 2 and problems.left_out == 0
    assert problems.summary().count("(kept): ") == 2
    assert kind != "not UTF-8" or "a.txt (kept): not UTF-8" in problems.summary()


@pytest.mark.parametrize(("name", "date"), [
    ("IMG-20220103-WA0007", "2022-01-03"), ("Screenshot_2021-08-09-10-11-12", "2021-08-09T10:11:12"),
    ("PXL_20230412_093015123", "2023-04-12T09:30:15"), ("a 2022-01-03 at 10.11.12", "2022-01-03T10:11:12"),
    ("WhatsApp Image 2022-01-03 at 10.11.12 PM", "2022-01-03"), ("000000554625", None), ("20221345", None),
    ("120220103", None), ("20220230", None),
])  # fmt: skip
def test_a_date_in_the_name_is_the_last_resort(name, date, tmp_path):
    assert file_fields(tmp_path, f"{name}.jpg", jpeg(), (), Problems().remark).get("date") == date
    (tmp_path / f"{name}.jpg.json").write_text('{"photoTakenTime": {"timestamp": "1560427269"}}')
    assert fields_of(tmp_path, f"{name}.jpg", jpeg(), Problems())["date"] == "2019-06-13T12:01:09"
    local = jpeg(exif=exif(DateTime="2019:06:12 23:30:00"))
    assert fields_of(tmp_path, f"{name}.jpg", local, Problems())["date"] == "2019-06-12T23:30:00"

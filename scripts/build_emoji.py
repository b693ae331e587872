"""Rebuild the embedded emoji set from the npm packages it comes from.

    python scripts/build_emoji.py [--check] [--packages FOLDER]

Needs npm on PATH (or the four .tgz files in FOLDER) and pillow. The result is deterministic: the same packages and the
same pillow give the same bytes; --check compares pixels and texts with the packed set instead of replacing it.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from PIL import Image

PACKAGES = {
    "noto": "emoji-datasource-google@16.0.0",
    "twemoji": "emoji-datasource-twitter@16.0.0",
    "fluent3d": "@lobehub/fluent-emoji-3d@1.1.0",
    "texts": "emojibase-data@17.0.0",
}
TARGET = Path(__file__).resolve().parents[1] / "src" / "sfumato" / "data" / "emoji_set"
SIDE, COLOURS = 64, 64


def fetch(folder: Path) -> dict[str, tarfile.TarFile]:
    """The packages as open archives, downloaded by npm where they are not in the folder yet."""
    archives = {}
    for name, package in PACKAGES.items():
        path = folder / (package.removeprefix("@").replace("/", "-").replace("@", "-") + ".tgz")
        if not path.exists():
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archives[name] = tarfile.open(path)  # noqa: SIM115 (read until the end of the script)
    return archives


def read(archive: tarfile.TarFile, member: str) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{archive.name!r}: {member} is not a file")
    return file.read()


def plain(hexcode: str) -> str:
    """A code point sequence without variation selectors, by which the packages are joined."""
    return "-".join(part for part in hexcode.upper().split("-") if part != "FE0F")


def small_png(data: bytes) -> bytes:
    """A picture on white, SIDE pixels square, with a palette."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    small = white.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS).quantize(COLOURS)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def find_pictures(archives: dict[str, tarfile.TarFile]) -> dict[str, dict[str, str]]:
    """style -> plain hexcode -> member of its archive."""
    found: dict[str, dict[str, str]] = {"noto": {}, "twemoji": {}, "fluent3d": {}}
    for style, vendor in (("noto", "google"), ("twemoji", "twitter")):
        for entry in json.loads(read(archives[style], "package/emoji.json")):
            if entry[f"has_img_{vendor}"]:
                found[style][plain(entry["unified"])] = f"package/img/{vendor}/64/{entry['image']}"
    for member in archives["fluent3d"].getnames():
        if member.endswith(".webp"):
            found["fluent3d"][plain(Path(member).stem)] = member
    return found


def build(archives: dict[str, tarfile.TarFile]) -> tuple[bytes, bytes]:
    """(pictures.zip, concepts.json)."""
    pictures = find_pictures(archives)
    groups = {g["order"]: g["key"] for g in json.loads(read(archives["texts"], "package/en/messages.json"))["groups"]}
    subgroups = {
        g["order"]: g["key"] for g in json.loads(read(archives["texts"], "package/en/messages.json"))["subgroups"]
    }
    concepts, members = [], []
    for entry in sorted(json.loads(read(archives["texts"], "package/en/data.json")), key=lambda e: e.get("order", -1)):
        code = plain(entry["hexcode"])
        if "group" not in entry or code not in pictures["noto"] or code not in pictures["twemoji"]:
            continue
        styles = [style for style in pictures if code in pictures[style]]
        concepts.append(
            {
                "hexcode": entry["hexcode"],
                "emoji": entry["emoji"],
                "label": entry["label"],
                "tags": sorted(entry.get("tags", [])),
                "group": groups[entry["group"]],
                "subgroup": subgroups[entry["subgroup"]],
                "styles": styles,
            }
        )
        members += [(f"{style}/{entry['hexcode']}.png", style, pictures[style][code]) for style in styles]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, style, member in sorted(members):
            archive.writestr(zipfile.ZipInfo(name), small_png(read(archives[style], member)))
    text = "[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in concepts) + "\n]\n"
    return buffer.getvalue(), text.encode()


def differences(pictures: bytes, concepts: bytes) -> list[str]:
    """What differs from the packed set: concepts, and pictures by their pixels."""
    found = [] if concepts == (TARGET / "concepts.json").read_bytes() else ["concepts.json"]
    with zipfile.ZipFile(io.BytesIO(pictures)) as new, zipfile.ZipFile(TARGET / "pictures.zip") as old:
        names = set(new.namelist()), set(old.namelist())
        found += sorted(names[0] ^ names[1])
        for name in sorted(names[0] & names[1]):
            pixels = [Image.open(io.BytesIO(archive.read(name))).convert("RGB").tobytes() for archive in (new, old)]
            if pixels[0] != pixels[1]:
                found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the packed set; exit status 1 if it differs")
    parser.add_argument(
        "--packages", type=Path, help="folder that holds, or receives, the .tgz files of the npm packages"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        pictures, concepts = build(fetch(options.packages or Path(temporary)))
    if options.check:
        found = differences(pictures, concepts)
        print("\n".join(found[:20]) if found else "the packed set is what the packages give")
        return 1 if found else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / "pictures.zip").write_bytes(pictures)
    (TARGET / "concepts.json").write_bytes(concepts)
    print(f"{len(json.loads(concepts))} concepts, {len(pictures) / 2**20:.1f} MB of pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Try an upgrade: what an older commit has made is read, answered and changed by this tree, and the way back.

    python scripts/upgrade_check.py COMMIT

The older version, in an environment of its own, trains a tiny model on the embedded emoji set, calibrates and exports
it, makes collections in a folder and in Milvus Lite with additions and deletions, and, where it
can, a collection of photographs without training, with verdicts. Then this version evaluates, searches, serves and
copies each of them, and its answers are compared: the same hits, distances within 1e-5, and the largest difference of
the probabilities. Last it adds and deletes, and the older version is asked for what this one has written.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from release_check import ROOT, TINY, environment, run, served, tried

QUERIES = ("a giraffe", "animal", "red heart", "flag of Japan", "something to eat")

STORES = {"collection": "file:", "graph-collection": "file:?engine=hnsw", "milvus": "milvus:milvus.db"}
"""Folder -> URL of the collections."""

EXACT = {"graph-collection": "collection"}
"""Gallery with approximate search -> the one with the same items and exact search, like its copy."""

CLOSE = 1e-5
"""Largest difference of distances and figures that is rounding."""

Hits = list[dict[str, Any]]


def install(kept: Path, name: str, source: Path) -> Path:
    """The folder of commands of an environment with the package of a source tree."""
    commands = environment(kept / name / "venv")
    if source != ROOT and (commands / "sfumato").exists():
        return commands
    run(commands / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "sfumato")
    wanted = f"{source}[serve,faiss,milvus,offline]"
    run(commands / "python", "-m", "pip", "install", "--quiet", "-c", source / "constraints.txt", wanted)
    return commands


def source_of(commit: str, folder: Path) -> Path:
    """The tree of a commit, in a folder."""
    archive = folder / "source.zip"
    run("git", "archive", "--format", "zip", "--output", archive, commit)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder / "source")
    return folder / "source"


def photographs(folder: Path, part: int) -> list[str]:
    """Write 90 more images into a folder of photographs; the names of the part."""
    with zipfile.ZipFile(ROOT / "src/sfumato/data/emoji_set/pictures.zip") as pictures:
        names = sorted(name for name in pictures.namelist() if name.endswith(".png"))[part::60][:90]
        for name in names:
            target = folder / f"{part}" / name.replace("/", "-")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(pictures.read(name))
    return [f"{part}/{name.replace('/', '-')}" for name in names]


def change(commands: Path, work: Path, name: str, part: int) -> None:
    """Add a part of the images to a collection, and delete three of it through the service."""
    photos = f"photos-{name}"
    doomed = photographs(work / photos, part)[:3]
    run(commands / "sfumato", "index", "run", "--images", photos, "--out", name, "--add", cwd=work)
    with served(commands, work, name) as url:
        body, head = json.dumps({"ids": doomed}).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/items/delete", body, head)
        urllib.request.urlopen(asked, timeout=60).close()


def make(commands: Path, work: Path) -> list[str]:
    """What the older version makes; the names of its galleries."""
    sfumato = commands / "sfumato"
    run(sfumato, "train", "emoji-pixels", *TINY, "--out", "run", cwd=work)
    run(sfumato, "calibrate", "run", cwd=work)
    run(sfumato, "export", "run", "exported", cwd=work)
    stored = ("--store", "file:")
    run(sfumato, "index", "run", "--split", "test", "--out", "index", *stored, cwd=work)
    run(sfumato, "index", "exported", "--images", "photos", "--out", "exported-index", *stored, cwd=work)
    for name, url in STORES.items():
        photographs(work / f"photos-{name}", 0)
        run(sfumato, "index", "run", "--images", f"photos-{name}", "--out", name, "--store", url, cwd=work)
        change(commands, work, name, 1)
    galleries = ["index", "exported-index", *STORES]
    if "--data" in run(sfumato, "index", "--help", cwd=work):
        run(sfumato, "index", "--data", "photos", "--out", "own", cwd=work)
        rows = [
            {"query": query, "id": hit["id"], "yes": int(i % 3 == 0), "judge": "ann", "when": "2026-01-01", "why": "a"}
            for query, hits in answers(commands, work, "own").items() for i, hit in enumerate(hits)
        ]  # fmt: skip
        (work / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        run(sfumato, "calibrate", "own", "--judgements", "verdicts.jsonl", cwd=work)
        galleries.append("own")
    return galleries


def answers(commands: Path, work: Path, gallery: str) -> dict[str, Hits]:
    """Query -> the hits of a gallery."""
    sfumato = commands / "sfumato"
    unfolded = ("--duplicates", "show") if "--duplicates" in run(sfumato, "search", "--help", cwd=work) else ()
    found = json.loads(run(sfumato, "search", gallery, *QUERIES, "-k", "10", *unfolded, "--json", cwd=work))
    return {one["query"]: one["hits"] for one in found}


def difference(before: dict[str, Hits], after: dict[str, Hits]) -> tuple[list[str], float]:
    """What differs between the answers of two versions, a line each, and the largest difference of probabilities."""
    wrong, largest = [], 0.0
    for query, hits in before.items():
        if len(after[query]) != len(hits):
            wrong.append(f"{query!r}: {len(after[query])} hits instead of {len(hits)}")
        for rank, (old, new) in enumerate(zip(hits, after[query], strict=False), 1):
            tied = {one["id"] for one in hits if abs(one["distance"] - new["distance"]) <= CLOSE}
            said = [one["match_probability"] for one in (old, new)]
            if abs(old["distance"] - new["distance"]) > CLOSE:
                wrong.append(f"{query!r}, hit {rank}: distance {new['distance']} instead of {old['distance']}")
            elif new["id"] not in tied and abs(new["distance"] - hits[-1]["distance"]) > CLOSE:
                wrong.append(f"{query!r}, hit {rank}: {new['id']} instead of {old['id']}")
            elif None in said and said != [None, None]:
                wrong.append(f"{query!r}, hit {rank}: probability {said[1]} instead of {said[0]}")
            elif None not in said and old["id"] == new["id"]:
                largest = max(largest, moved := abs(said[0] - said[1]))
                if moved > CLOSE:
                    wrong.append(f"{query!r}, hit {rank}: probability {said[1]} instead of {said[0]}")
    return wrong, largest


def figures(commands: Path, work: Path) -> dict[str, float]:
    """Direction and name -> a figure of the run."""
    found = json.loads(run(commands / "sfumato", "evaluate", "run", "run", "--json", cwd=work))
    return {f"{way} {name}": float(x) for way in ("i2t", "t2i") for name, x in found[way].items()}


def read_by_new(new: Path, work: Path, before: dict[str, dict[str, Hits]], known: dict[str, float]) -> list[str]:
    """Read what the older version made, and compare with its answers and figures; what is wrong, a line each."""
    found = figures(new, work)
    names = sorted(name for name in known if name not in found or abs(found[name] - known[name]) > CLOSE)
    wrong = [f"evaluate: {name} is {found.get(name)}, was {known[name]}" for name in names]
    for gallery, answer in before.items():
        run(new / "sfumato", "copy", gallery, f"{gallery}-copy", cwd=work)
        for name, expected in ((gallery, answer), (f"{gallery}-copy", before[EXACT.get(gallery, gallery)])):
            differs, largest = difference(expected, answers(new, work, name))
            wrong += [f"{name}: {line}" for line in differs]
            print(f"{name}: {len(differs)} differences; probabilities differ by {largest:.2g} at most", flush=True)
        with served(new, work, gallery) as url, urllib.request.urlopen(f"{url}/v1/search?q=animal", timeout=60) as said:
            hits = json.load(said)["answers"][0]["hits"]
        if hits[0]["id"] not in [one["id"] for one in answer["animal"]]:
            wrong.append(f"{gallery}: the service says {hits[0]['id']} first")
    return wrong


def read_by_old(old: Path, new: Path, work: Path, galleries: Sequence[str]) -> list[str]:
    """What the older version does with what this one changes and makes; it must answer alike, or refuse in a line."""
    for name in STORES:
        change(new, work, name, 2)
    run(new / "sfumato", "index", "run", "--split", "test", "--out", "new-index", cwd=work)
    run(new / "sfumato", "export", "run", "new-exported", cwd=work)
    run(new / "sfumato", "train", "emoji-pixels", *TINY, "--out", "new-run", cwd=work)
    written = [*galleries, "new-index", *(f"{name}-copy" for name in galleries)]
    asked: list[tuple[str, ...]] = [("search", name, QUERIES[0]) for name in written]
    asked += [("index", name, "--images", "photos", "--out", f"old-of-{name}") for name in ("new-run", "new-exported")]
    wrong = []
    for command in asked:
        done = tried(old / "sfumato", *command, cwd=work)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else ["answers"]
        print(f"older version, {' '.join(command[:2])}: {' '.join(said)}", flush=True)
        if done.returncode not in (0, 2) or "Traceback" in done.stderr:
            wrong.append(f"older version, {' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        elif not done.returncode and command[1] in STORES:
            differs, _ = difference(answers(new, work, command[1]), answers(old, work, command[1]))
            wrong += [f"older version, {command[1]}, after changes by this one: {line}" for line in differs]
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older version")
    parser.add_argument("--folder", type=Path, help="keep the environments here, for a next time; else a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sfumato-upgrade-") as temporary:
        work = Path(temporary, "work")
        work.mkdir()
        kept = options.folder.resolve() if options.folder else Path(temporary)
        old, new = install(kept, options.commit, source_of(options.commit, Path(temporary))), install(kept, "new", ROOT)
        photographs(work / "photos", 0)
        galleries = make(old, work)
        before = {name: answers(old, work, name) for name in galleries}
        wrong = read_by_new(new, work, before, figures(old, work)) + read_by_old(old, new, work, galleries)
    print("upgrade-check:", *(wrong or ["no difference, and nothing that breaks"]), sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

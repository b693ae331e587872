"""Spoils valid inputs at random: bytes, JSON values, lines of text, safetensors files, and files of a folder."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRINGS = (
    *("", " ", "\0", "a\nb", "a\r\nb", "\u2028", "\ud800", "\u202e", "é", "..", ".", "/etc/passwd", "~"),
    *("../../../../etc/passwd", "a/../../b", "..\\..\\x", "x" * 300, "x" * 70_000, "nan", "1e999", "-1", "{}", "[["),
    *("%s%n", "{0}", "${HOME}", "'; DROP TABLE items; --", "file:///etc/passwd", "http://127.0.0.1:9/", "\x1b[31m"),
)
"""Texts that nobody expects."""

NUMBERS = (
    0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324,
    *map(float, ["inf", "nan", "-inf"]),
)  # fmt: skip
"""Numbers that nobody expects."""


def any_value(chance: random.Random) -> Any:
    """A JSON value that nobody expects.

    Args:
        chance: source of randomness.

    Returns:
        The value; sometimes with NaN, lone surrogates or 2,000 levels.
    """
    kind = chance.randrange(9)
    if kind < 3:
        return chance.choice(STRINGS)
    if kind < 6:
        return chance.choice(NUMBERS)
    if kind == 6:
        return chance.choice((None, True, False, [], {}, [None], {"": ""}, [[]], {"a": {"b": []}}))
    if kind == 7:
        return [any_value(chance) for _ in range(chance.randrange(4))]
    return {chance.choice(STRINGS): any_value(chance)}


def spoil_value(value: Any, chance: random.Random) -> Any:
    """Change one place of a JSON value: replace, remove, rename, double or add something.

    Args:
        value: of dictionaries, lists and plain values; not changed.
        chance: source of randomness.

    Returns:
        A changed copy.
    """
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = [({"": value}, "")]
    for holder, key in places:
        inner = holder[key]
        if isinstance(inner, dict | list):
            places += [(inner, one) for one in (list(inner) if isinstance(inner, dict) else range(len(inner)))]
    holder, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0 and holder is not places[0][0]:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(STRINGS)] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 3 and isinstance(holder[key], list | dict | str):
        holder[key] = holder[key] * 3 if isinstance(holder[key], list | str) else [holder[key]]
    elif kind == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] + chance.choice((1, -1, 0.5, 1000))
    else:
        holder[key] = any_value(chance)
    return places[0][0].get("", any_value(chance))


def spoil_bytes(data: bytes, chance: random.Random) -> bytes:
    """Damage bytes: cut them, flip bits, overwrite, insert, remove or repeat a piece.

    Args:
        data: the bytes.
        chance: source of randomness.

    Returns:
        Other bytes, sometimes none.
    """
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(found) + 1) if chance.random() < 0.6 else chance.randrange(min(len(found), 200) + 1)
        length = chance.choice((1, 1, 2, 4, 8, 64, 512))
        piece = chance.choice(_PIECES) if chance.random() < 0.5 else chance.randbytes(length)
        kind = chance.randrange(9)
        if kind == 0:
            del found[at:]
        elif kind == 1:
            found[at : at + len(piece)] = piece
        elif kind == 2:
            found[at:at] = piece
        elif kind == 3:
            del found[at : at + length]
        elif kind == 4:
            found[at:at] = found[at : at + length] * chance.choice((1, 2, 50))
        elif kind == 5 and chance.random() < 0.1:
            found = bytearray(piece)
        elif kind == 6 and (digits := [i for i, one in enumerate(found[:4000]) if 48 <= one < 58]):
            at = chance.choice(digits)
            found[at : at + 1] = chance.choice((b"", b"-", b"9" * 30, b"0", b".", b"e9", b"9" * 5000))
        elif found:
            found[min(at, len(found) - 1)] ^= 1 << chance.randrange(8)
    return bytes(found)


_PIECES = (
    *(b"", b"\0", b"\0" * 64, b"\xff" * 8, b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x80", b"\n", b"\r\n"),
    *(b'"', b"'", b"{", b"[" * 5000, b"{" * 5000, b"(" * 5000, b"]", b",", b"=", b"\\", b"a" * 70_000, b"-1", b"NaN"),
    *(struct.pack("<q", 2**62), struct.pack(">q", 2**62), struct.pack("<i", -1), b"../../../../etc/passwd\0"),
)


def as_json(value: Any, chance: random.Random) -> bytes:
    """A value as JSON; sometimes nested deeply, or with the bytes damaged.

    Args:
        value: of dictionaries, lists and plain values.
        chance: source of randomness.

    Returns:
        The bytes.
    """
    data = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if chance.random() < 0.03:
        depth = chance.choice((50, 3000, 100_000))
        data = data.replace(b'": ', b'": ' + b'{"a": ' * depth, 1) + b"}" * depth
    return spoil_bytes(data, chance) if chance.random() < 0.1 else data


def spoil_json_file(path: Path, chance: random.Random) -> None:
    """Change a value of a JSON file.

    Args:
        path: the file.
        chance: source of randomness.
    """
    path.write_bytes(as_json(spoil_value(json.loads(path.read_bytes()), chance), chance))


def spoil_safetensors(path: Path, chance: random.Random) -> None:
    """Change the header of a safetensors file, or numbers of its tensors, and keep the rest in order.

    Args:
        path: the file.
        chance: source of randomness.
    """
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    if chance.random() < 0.6:
        header = spoil_value(header, chance)
    else:
        value = chance.choice((float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 1e-45, 0.0))
        for at in chance.sample(range(0, len(body) - 3, 4), chance.choice((1, 1, 5))):
            body[at : at + 4] = struct.pack("<f", value)
    made = as_json(header, chance)
    path.write_bytes(struct.pack("<Q", len(made)) + made + body)


def spoil_text(path: Path, chance: random.Random, values: Callable[[], str]) -> None:
    """Change lines of the form key = value: remove, repeat or swap lines, or give a key another name or value.

    Args:
        path: the file.
        chance: source of randomness.
        values: gives a value as text.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        kind, (key, mark, value) = chance.randrange(6), lines[at].partition("=")
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(chance.randrange(len(lines)), lines[at])
        elif kind == 2 and mark:
            lines[at] = f"{chance.choice((key[1:], key + 's', key + '.a', chance.choice(STRINGS)))}={value}"
        elif mark:
            lines[at] = f"{key}= {values()}"
        else:
            lines[at] = values()
        lines = lines or [""]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))


def spoil_folder(folder: Path, chance: random.Random) -> None:
    """Damage a file of a folder, or remove it, or put a folder, an empty file or a link to itself in its place.

    Args:
        folder: the folder.
        chance: source of randomness.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    path, kind = chance.choice(files), chance.randrange(14)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind == 2:
        path.unlink()
        path.symlink_to(path.name)
    elif kind < 8 and path.suffix in (".json", ".safetensors") and path.stat().st_size > 2:
        (spoil_json_file if path.suffix == ".json" else spoil_safetensors)(path, chance)
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), chance))

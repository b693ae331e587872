"""Messages for a terminal, and the errors that commands print."""

import subprocess
from pathlib import Path

import pytest

from sfumato.errors import UserError, as_typed, explain_os_error, printable


def test_links_to_themselves_and_full_disks_are_explained(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError) as caught:
        (tmp_path / "a").read_bytes()
    assert "a: is a link that leads back to itself" in explain_os_error(caught.value)
    message = "here/index: the disk is full; free some space, then run the same command again"
    assert explain_os_error(UserError(message)) == message, "a message of ours keeps its path"
    assert explain_os_error(OSError(28, "No space left on device", "a/b")).startswith("a/b: the disk is full")


def test_what_a_terminal_or_a_shell_would_take_otherwise_is_escaped(sfumato):
    assert printable("a\x1b[2Jb\rc\x00\u202e\udce9\u2028 é ü 中\td\ne") == (
        "a\\x1b[2Jb\\rc\\x00\\u202e\\udce9\\u2028 é ü 中\td\ne"
    )
    assert printable("x" * 30 + "\n" + "y" * 5, most=10) == "x" * 10 + " ...\nyyyyy"
    told = sfumato.refused("train", "\x1b[31mno\r.toml")
    assert "\\x1b[31mno\\r.toml" in told and "\x1b" not in told and "\r" not in told
    words = ["sfumato", "search", Path("my runs/ü"), "it's a dog", "--out=x"]
    assert as_typed(*words) == "sfumato search 'my runs/ü' 'it'\"'\"'s a dog' --out=x"
    printed = subprocess.run(["sh", "-c", f"printf '%s\\n' {as_typed(*words)}"], capture_output=True, check=True).stdout
    assert printed.decode().splitlines() == [str(word) for word in words]

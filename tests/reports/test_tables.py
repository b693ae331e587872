"""Tables of the console: as wide as the screen, with every value whole."""

import pytest

from sfumato.reports.tables import print_table, print_wrapped

NAMES = [f"figure number {k}" for k in range(7)]
ROWS = [[f"row{r}", *(f"{r}{k} [{r}.{k}01, {r}.{k}99]" for k in range(7))] for r in range(3)]


def test_a_wide_table_is_continued_below_and_no_value_is_cut(capsys):
    print_table("a title", ["estimator", *NAMES], ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and out.startswith("a title\n")
    for row in ROWS:
        assert all(out.count(value) == 1 for value in row[1:])
        assert out.count(row[0]) == out.count("estimator") > 1
    print_table("", ["name", "value"], [["a", "x" * 100]])
    assert "x" * 100 in capsys.readouterr().out
    words = [f"word{k}" for k in range(60)]
    print_table("", ["name", "n", "words"], [["a", "1", " ".join(words)]], running=[2])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and [w for w in out.split() if w.startswith("word")][1:] == words


@pytest.mark.parametrize("indent", [0, 4])
def test_paragraphs_are_wrapped_and_paths_stay_whole(indent, capsys):
    path = "/a" * 60
    print_wrapped(f"  written to {path} with some more words that do not fit into the line, whatever they say", indent)
    lines = capsys.readouterr().out.splitlines()
    assert path in [line.strip() for line in lines]
    assert lines[0].startswith("  w") and lines[-1].startswith(" " * indent + lines[-1].strip()[0])

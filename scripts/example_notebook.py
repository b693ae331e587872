"""Write docs/examples/named-models.ipynb from named_models.py, in which "# %%" begins a cell. Nothing is run.

python scripts/example_notebook.py
"""

import json
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "named_models.py", EXAMPLES / "named-models.ipynb"


def notebook(script: str) -> str:
    """The text of the notebook of a script."""
    cells: list[dict[str, object]] = []
    for i, part in enumerate(script.split("# %%")[1:]):
        kind, _, text = part.partition("\n")
        cell: dict[str, object] = {"cell_type": "code", "execution_count": None, "outputs": []}
        if kind.strip() == "[markdown]":
            cell, text = {"cell_type": "markdown"}, "\n".join(line[2:] for line in text.strip().splitlines())
        cells.append({**cell, "id": f"cell-{i}", "metadata": {}, "source": text.strip().splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    made = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")

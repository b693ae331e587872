"""The guide about thresholds runs as it is printed, with NumPy alone, and prints what it says that it prints."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "thresholds.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_blocks_print_what_the_guide_says(tmp_path):
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    expected = "".join(text for language, text in blocks if language == "text")
    assert len([text for language, text in blocks if language == "text"]) == 7
    code = "".join(text for language, text in blocks if language == "python")
    data = (ROOT / "docs" / "examples" / "score_lists.csv").as_posix()
    code = code.replace("docs/examples/score_lists.csv", data)
    code += "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected

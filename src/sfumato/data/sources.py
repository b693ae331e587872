"""Data sets in the layouts that their users own: Karpathy's JSON."""
from pathlib import Path
from sfumato.data.pairs import PairData
from sfumato.data.problems import Problems
def read_karpathy(path: Path, images: Path, problems: Problems) -> dict[str, PairData]: ...

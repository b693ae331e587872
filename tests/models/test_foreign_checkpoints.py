"""Other people's checkpoints: plain content comes out as it is, code does not run."""

import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.raising import raises

from sfumato.errors import UserError
from sfumato.models.pretrained_tensors import read_checkpoint


def refuse_to_run(self, state):
    raise AssertionError("code of the file's class ran")


def test_tensors_settings_and_formats(tmp_path):
    state = {"weight": torch.arange(4.0)}
    save_file(state, tmp_path / "new.safetensors")
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("new.safetensors", "zip.pt", "old.pth"):
        assert torch.equal(read_checkpoint(tmp_path / name)["weight"], state["weight"])
    values = {
        "float64": np.float64(0.1), "float32": np.float32(0.5), "int64": np.int64(-7), "bool": np.bool_(True),
        "swapped": np.array(3, dtype=">i4")[()],
    }  # fmt: skip
    torch.save({"metadata": values}, tmp_path / "pcme.pth")
    metadata = read_checkpoint(tmp_path / "pcme.pth")["metadata"]
    assert metadata == {key: value.item() for key, value in values.items()}
    assert {type(value) for value in metadata.values()} == {float, int, bool}


class Trap:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_does_not_run(zipped, tmp_path):
    target = tmp_path / "made-by-the-pickle"
    trap = {"state_dict": {"a": torch.ones(1)}, "trap": Trap(str(target))}
    torch.save(trap, tmp_path / "trap.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"trap.pt: holds a (posix|nt).mkdir, and reading that would run code"):
        read_checkpoint(tmp_path / "trap.pt")
    assert not target.exists()


class Own:
    pass


def test_damaged_files_files_of_something_else_and_foreign_classes(tmp_path):
    raises(UserError, "there is no checkpoint", read_checkpoint, tmp_path / "missing.pt")
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in (
        ("cut.pt", whole[:-700]),
        ("empty.pt", b""),
        ("text.pt", b"hello world, this is no checkpoint"),
        ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{"),
    ):
        (tmp_path / name).write_bytes(content)
        raises(UserError, f"{name}: damaged, or not a checkpoint", read_checkpoint, tmp_path / name)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    old = (tmp_path / "old.pt").read_bytes()
    key = re.findall(rb"\d{6,}", old)[-1]  # Of the storage: once in the description of the tensor, once in a list.
    at = old.rindex(key)
    (tmp_path / "old.pt").write_bytes(old[:at] + key[::-1] + old[at + len(key) :])
    raises(UserError, r"old\.pt: damaged, or not a checkpoint", read_checkpoint, tmp_path / "old.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    raises(UserError, "holds a list, expected a dictionary", read_checkpoint, tmp_path / "list.pt")
    torch.save({"model": Own()}, tmp_path / "module.pt")
    with pytest.raises(UserError, match=r"holds a .*test_foreign_checkpoints.Own.*save only its state dict"):
        read_checkpoint(tmp_path / "module.pt")

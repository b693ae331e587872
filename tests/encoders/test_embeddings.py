"""Embeddings as inputs: rows of a table or .npy files; texts and other sizes are refused in one line."""

import io

import numpy as np
import pytest
import torch
from support.raising import raises

from sfumato.data.feature_tables import EmbeddingRow, EmbeddingTable
from sfumato.data.pairs import PairData, make_pair_data
from sfumato.encoders.encoder_protocol import BuildContext
from sfumato.encoders.feature_rows import EmbeddingImageConfig, EmbeddingTextConfig, build_embeddings, described_by
from sfumato.encoders.processors import EmbeddingProcessor
from sfumato.errors import UserError

VALUES = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).half()
TABLE = EmbeddingTable("mine.npy", [[VALUES]])


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


context = lambda tmp_path, description=None: BuildContext(8, False, 0.25, 0.0, tmp_path, description=description)


def test_rows_go_into_batches_as_one_token_each_and_files_of_one_vector_are_read_too():
    store, kept = EmbeddingProcessor(6).read([EmbeddingRow(TABLE, row) for row in (3, 19, 0, 7)])
    assert len(store) == 4 and kept.tolist() == [0, 1, 2, 3]
    inputs = store.batch(np.array([2, 0, 0])).to("cpu")
    assert inputs.mask is None and inputs.values.dtype == torch.float32
    torch.testing.assert_close(inputs.values, VALUES[[0, 3, 3]].float().unsqueeze(1), rtol=0, atol=0)
    items = [lambda: npy(np.arange(6.0)), EmbeddingRow(TABLE, 5), lambda: npy(np.ones((1, 6), np.float32))]
    store, kept = EmbeddingProcessor(6).read(items)
    expected = torch.stack([torch.arange(6.0), VALUES[5].float(), torch.ones(6)]).unsqueeze(1)
    torch.testing.assert_close(store.batch(np.arange(3)).to("cpu").values, expected, rtol=0, atol=0)
    problems = {}
    wrong = [lambda: npy(np.ones(5)), lambda: npy(np.ones((2, 6))), items[0], lambda: b"no"]
    store, kept = EmbeddingProcessor(6).read(wrong, on_error=problems.__setitem__)
    assert kept.tolist() == [2] and sorted(problems) == [0, 1, 3]
    assert "holds 1 x 5 numbers; this model reads one embedding of 6" in str(problems[0])
    raises(ValueError, "holds 2 x 6 numbers", EmbeddingProcessor(6).read, wrong[1:])
    text = "reads embeddings and has no encoder for 'a dog': give a .npy file of 6"
    raises(UserError, text, EmbeddingProcessor(6).read, [lambda: "a dog"], on_error=lambda i, error: None)
    message = "mine.npy: has 6 channels, and this model reads 7"
    raises(UserError, message, EmbeddingProcessor(7).read, [EmbeddingRow(TABLE, 0)])


@pytest.mark.parametrize("config", [EmbeddingImageConfig(whiten=0), EmbeddingTextConfig(whiten=0)])
def test_the_encoder_whitens_and_describes_itself(tmp_path, config):
    processor, encoder = build_embeddings(config, context(tmp_path, {"channels": 6}))
    assert processor.channels == encoder.channels == 6 and encoder.description == {"channels": 6}
    store, _ = processor.read([EmbeddingRow(TABLE, row) for row in range(20)])
    encoder.eval().fit(store)
    out = encoder(store.batch(np.arange(20)).to("cpu")).mean[:, 0]
    values = VALUES.double()
    expected = (values - values.mean(0)) / values.std(0, unbiased=False)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    raises(ValueError, "has the channels of its data; none are given", build_embeddings, config, context(tmp_path))


def test_data_say_how_many_channels_they_have():
    rows = tuple(EmbeddingRow(TABLE, row) for row in range(2))
    wide = tuple(EmbeddingRow(EmbeddingTable("w", [[VALUES, VALUES], [torch.ones(40, 1)]]), row) for row in range(2))
    texts = ("c", "d"), ("c", "d"), ("caption",) * 2
    data = PairData(("a", "b"), rows, *texts, np.array([[0, 0], [1, 1]]), text_rows=wide)
    assert described_by(data) == {"image": {"channels": 6}, "text": {"channels": 7}}
    assert described_by(make_pair_data([], [], [])) == {}
    of_rows = lambda text_rows: PairData(("a",), rows[:1], *texts, np.array([[0, 0]]), text_rows=text_rows)
    raises(ValueError, "got 1 text rows for 2 texts", of_rows, wide[:1])

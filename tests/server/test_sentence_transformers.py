"""Vectors of the router beside those of the package sentence-transformers, which reads the same directory by itself.

The package is not a dependency: `pip install sentence-transformers` beside ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.router.router_process import serving
from tests.server.test_vectors import ABS, TEXTS, post
from tests.server.tiny_readers import HIDDEN_SIZE, reader_config, reader_node, save_reader

if TYPE_CHECKING:
    from pathlib import Path

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Pooling by the last token and normalizing are as its own modules read them from the files."""
    directory = save_reader(tmp_path, is_embedder=True).directory
    theirs = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    assert [type(module).__name__ for module in theirs] == ["Transformer", "Pooling", "Normalize"]
    vectors = np.asarray(theirs.encode(TEXTS, batch_size=2))
    assert vectors.shape == (len(TEXTS), HIDDEN_SIZE)
    async with (
        reader_node(reader_config(directory, "prefill")) as p,
        reader_node(reader_config(directory, "decode")) as d,
        serving([p], [d]) as router,
    ):
        answer = await post(f"{router.url}/v1/embeddings", {"input": TEXTS})
        ours = np.array([one["embedding"] for one in answer["data"]])
        assert np.abs(ours - vectors).max() < ABS
        short = await post(f"{router.url}/v1/embeddings", {"input": TEXTS, "dimensions": 16})
        await router.idle()
    cut = np.asarray(theirs.encode(TEXTS, truncate_dim=16, normalize_embeddings=True))
    assert np.abs(np.array([one["embedding"] for one in short["data"]]) - cut).max() < ABS
    assert np.abs(vectors[0] - vectors[1]).max() > 100 * ABS, "texts differ"

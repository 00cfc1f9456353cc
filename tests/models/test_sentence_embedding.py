"""The packaged MiniLM, beside sentence-transformers."""

import numpy as np

from ctx_compress_rag.models.sentence_embedding import embed_passages, embed_questions
from helpers.methods import minilm

# Also control tokens, padding that a text spells, blank texts, and a text beyond 256 tokens.
TEXTS = ["Who keeps bees?", "", " \n", "a [PAD] b [SEP] c", "Über Straße, 東京 \u200b 🙂", "Zwei bees " * 400, "é" * 90]


def test_minilm_has_the_vectors_of_sentence_transformers() -> None:
    expected = minilm().encode(TEXTS, normalize_embeddings=True)
    for embed in (embed_passages, embed_questions):
        np.testing.assert_allclose(embed(TEXTS), expected, atol=1e-6)
    assert embed_passages([]).shape == (0, 384)

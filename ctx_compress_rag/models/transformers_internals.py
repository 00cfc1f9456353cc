"""The private names of transformers that this library needs, each with the reason; `transformers<6` bounds them."""

from __future__ import annotations

from typing import Any


def commit(model: Any) -> str:
    """The commit on the hub that a model was loaded from, or "".

    transformers records it nowhere else, and `revision` may be a branch, which moves.
    """
    return str(getattr(model.config, "_commit_hash", None) or "")

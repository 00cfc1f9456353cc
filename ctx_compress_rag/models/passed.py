"""Keep what has passed a proof in the hub's cache of assets, so that the proof runs once."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def unless_passed(proofs: str, key: str, prove: Callable[[], object]) -> None:
    """Call `prove`, unless it has returned before for this key, in the cache's folder of these proofs."""
    from huggingface_hub import cached_assets_path

    passed: Path | None = None
    with suppress(OSError):  # a home that cannot be written costs a proof each time
        passed = Path(cached_assets_path("ctx_compress_rag", proofs), key)
        if passed.exists():
            return
    prove()
    if passed is not None:
        with suppress(OSError):
            passed.touch()

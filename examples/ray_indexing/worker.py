"""What a worker does: turn texts into payloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ctx_compress_rag.store.codec import DEFAULT_CODEC, check_codec
from ctx_compress_rag.store.passage import Passage
from ctx_compress_rag.store.record import payload_of

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle


class CompressPassages:
    """Compresses batches of passages, in Ray Data's `map_batches` or when called.

    `dataset.map_batches(CompressPassages, fn_constructor_kwargs={"bundle": folder}, batch_size=64, concurrency=2)`
    loads the bundle once in each worker, on its device, and adds columns to the dataset. The workers need no key and
    write nothing: one process seals and stores their results (`store_dataset`).

    Args:
        bundle: a bundle, or its folder, shipped name or hub id.
        ratio: source tokens per slot; None takes the bundle's base ratio.
        codec: the store's codec.
        device, dtype: for a bundle that is loaded here, as in `Bundle.from_pretrained`.

    Raises:
        BundleError, RatioError, ConfigError: as in `Bundle.from_pretrained`, or an argument has an impossible value.
    """

    def __init__(
        self,
        bundle: Bundle | str,
        ratio: int | None = None,
        codec: str = DEFAULT_CODEC,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        from ctx_compress_rag.bundle.bundle import Bundle

        if isinstance(bundle, str):
            bundle = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
        self.bundle = bundle
        self.ratio = self.bundle.config.base_ratio if ratio is None else ratio
        self.bundle.check_ratio(self.ratio)
        self.codec = check_codec(codec)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Add `payload` and `fingerprint` to a batch of str `id` and `text`.

        Raises:
            PayloadError: the bundle made a NaN or infinity; the message names the passage.
        """
        texts = [str(text) for text in batch["text"]]
        softs = self.bundle.compress(texts, self.ratio)
        made: dict[str, Any] = {
            "payload": [
                payload_of(Passage(text, str(id)), soft, self.codec)
                for text, id, soft in zip(texts, batch["id"], softs, strict=True)
            ],
            "fingerprint": [self.bundle.fingerprint] * len(texts),
        }
        return {**batch, **made}

"""Adapting a decoder by a saved adaptation, and saving what changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.baselines import BaseAdapter, PredictedUpdate, as_read
from ctx_compress_rag.adaptation.decoder import Adaptation, Adapted, AdaptiveDecoder
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.bundle.decoder import Decoder
from ctx_compress_rag.bundle.files import ADAPTER_CONFIG_FILE
from ctx_compress_rag.errors import ConfigError

_LOADED: WeakKeyDictionary[Decoder, dict[Path, tuple[list[tuple[Path, int]], Adaptation]]] = WeakKeyDictionary()


def adapt(
    decoder: AdaptiveDecoder,
    demonstrations: Sequence[Demonstration],
    adaptation: Adaptation | str | Path,
    ratio: int | None = None,
) -> AdaptiveDecoder:
    """A decoder adapted to demonstrations; the one given stays as it is, and both share their weights.

    Args:
        decoder: what to adapt.
        demonstrations: solved examples. Their passages are texts, or markers.
        adaptation: an adaptation, or the folder of a saved one (see `load_adaptation`).
        ratio: read the passages as soft contexts of the decoder's store, with so many source tokens per slot;
            missing ones are compressed and stored. None reads the passages as they are given.

    Raises:
        ConfigError: there are no demonstrations, one cannot be read, or there is no store for a ratio.
        BundleError: the folder holds no adaptation for this decoder.
        RatioError: the ratio cannot be made from what is stored.
    """
    if ratio is not None:
        if decoder.store is None:
            raise ConfigError(f"ratio={ratio} needs a store: give the decoder one")
        demonstrations = [demonstration.marked(decoder.store, ratio) for demonstration in demonstrations]
    if not isinstance(adaptation, Adaptation):
        adaptation = load_adaptation(adaptation, decoder)
    if ratio is not None and isinstance(adaptation, PredictedUpdate) and adaptation.config.ratio != ratio:
        raise ConfigError(
            f"ratio={ratio}: this predictor was trained with passages as {as_read(adaptation.config.ratio)}"
        )
    return decoder.adapt(demonstrations, adaptation)


def with_adapter(decoder: AdaptiveDecoder, folder: str | Path) -> AdaptiveDecoder:
    """The decoder with a saved peft adapter in place of its own changes.

    Raises:
        BundleError: the folder holds no peft adapter for this decoder.
    """
    return decoder.with_change(Adapted(Adapter.from_pretrained(folder, decoder.bundle.backbone.model)))


def load_adaptation(folder: str | Path, decoder: AdaptiveDecoder) -> Adaptation:
    """Load an adaptation from its folder: an update predictor, or a LoRA adapter in peft's format.

    It is read once for each bundle, and again if a file in the folder has changed.

    Raises:
        BundleError: the folder holds none of them, or one for another decoder.
    """
    folder = Path(folder).resolve()
    stamp = [(file, file.stat().st_mtime_ns) for file in sorted(folder.rglob("*"))]
    kept = _LOADED.setdefault(decoder.bundle, {})
    if folder not in kept or kept[folder][0] != stamp:
        found: Adaptation
        if (folder / ADAPTER_CONFIG_FILE).exists():
            found = BaseAdapter(Adapter.from_pretrained(folder, decoder.bundle.backbone.model))
        else:
            found = PredictedUpdate.from_pretrained(folder, decoder)
        kept[folder] = (stamp, found)
    return kept[folder][1]


def save_adapter(decoder: AdaptiveDecoder, folder: str | Path) -> None:
    """Write an adapted decoder's change as an ordinary peft adapter.

    Raises:
        ConfigError: it is not adapted.
    """
    adapter = decoder.adapted.adapter
    if adapter is None:
        raise ConfigError("this decoder is not adapted: there is no adapter to save")
    adapter.save_pretrained(folder, decoder.bundle.decoder_name)

"""The weighted mean of two bundles' weights."""

import torch

from ctx_compress_rag.bundle.bundle import Bundle


def mix(start: Bundle, trained: Bundle, share: float) -> Bundle:
    """Move the weights that training changes from `start`'s towards `trained`'s, by `share` of the way, in place.

    Returns: `trained`, so mixed.
    """
    ways = [bundle.compressor.trained_parameters() + bundle.reader.trained_parameters() for bundle in (start, trained)]
    with torch.no_grad():
        for before, after in zip(*ways, strict=True):
            after.copy_(torch.lerp(before, after, share))
    return trained

"""Counting floating-point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def counting() -> FlopCounterMode:
    """A context that counts operations of matrix products and attention, forward and backward, in this thread.

    A multiplication and its addition count as two. The operations of a compiled model are not counted.
    """
    # torch counts only its attention kernels for GPUs; the one for CPUs has the same products.
    aten: Any = torch.ops.aten
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    return FlopCounterMode(display=False, custom_mapping=kernels)

"""Pooling of vectors."""

import pytest
import torch

from ctx_compress_rag.soft_context import SoftContext, mean_pool_slots


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    """The mean of numbers that float16 holds is one that it holds, whatever their sum."""
    vectors = 1000 + torch.rand(256, 3)
    pooled, counts = mean_pool_slots(vectors.to(dtype), torch.ones(256, dtype=torch.long), 128)
    assert pooled.dtype == dtype and counts.tolist() == [128, 128]
    expected = vectors.to(dtype).double().unflatten(0, (2, 128)).mean(1)
    torch.testing.assert_close(pooled.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    merged = SoftContext(pooled, counts).merge(2)
    torch.testing.assert_close(merged.slots.double(), expected.mean(0, keepdim=True), rtol=0.01, atol=0)

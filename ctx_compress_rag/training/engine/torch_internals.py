"""The private names of torch that this library needs; `torch<3` bounds them.

Only the newest releases have public names: `torch.compile(recompile_limit=...)`, `torch.cpu.get_capabilities`.
"""

import torch


def compile_for_all() -> None:
    """Set torch, for the process, to compile one layer's code often, and to run it uncompiled without a compiler."""
    torch._dynamo.config.suppress_errors = True
    # The same code is compiled for each adapter, with and without gradients, and for each kind of mask.
    torch._dynamo.config.recompile_limit = 64


def cpu_has_bfloat16() -> bool:
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()

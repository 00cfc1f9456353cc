"""How a bundle's decoder is loaded: its dtype and its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.errors import BundleError, ConfigError


@pytest.fixture(scope="module", params=[False, True], ids=["half", "int8"])
def folder(request: Any, make_tiny_bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("options")
    make_tiny_bundle(seed=5).save_pretrained(made, int8=request.param)
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", torch.bfloat16, "float32"])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: Any) -> None:
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))
    whole, loaded = Bundle.from_pretrained(folder), Bundle.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in loaded.backbone.own_state().values()} == {wanted}
    assert loaded.fingerprint == whole.fingerprint
    for name, weight in loaded.backbone.own_state().items():
        assert torch.equal(weight, whole.backbone.own_state()[name].to(wanted))
    [soft] = loaded.compress(["Orla kept bees in Pellmouth."])
    assert torch.isfinite(loaded.embed(soft)).all()
    assert TransformersDecoder(loaded).generate(["Who kept bees?"], Sampling(3))[0].completion_tokens


def test_the_attention_is_the_one_asked_for(folder: Path) -> None:
    answers = []
    for name in ("eager", "sdpa"):
        bundle = Bundle.from_pretrained(folder, attn_implementation=name)
        assert bundle.backbone.model.config._attn_implementation == name
        answers.append(TransformersDecoder(bundle).generate(["Who kept bees?"], Sampling(6)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["int8", "float64x", "half a bit", torch.int32, "nn"])
def test_what_is_no_dtype(folder: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="choose float32, bfloat16 or float16"):
        Bundle.from_pretrained(folder, dtype=dtype)


def test_what_is_no_attention(folder: Path) -> None:
    with pytest.raises(BundleError, match="telepathy"):
        Bundle.from_pretrained(folder, attn_implementation="telepathy")

"""To a bundle that reads English: stages end to end, time limits, speed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.cli import main
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.text.templates import question_messages
from ctx_compress_rag.training.engine.loop import count_batch_tokens, speed_report
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, passage_token_shares
from ctx_compress_rag.training.run import run_recipe
from ctx_compress_rag.training.stages.distillation import DistillationCollator, DistillationLoss
from helpers.training import losses, report, write_recipe


def test_a_window_beyond_the_decoders_positions_is_refused(decoder: Path, tmp_path: Path) -> None:
    """Some decoders would train at positions that they never learned, others raise an IndexError."""
    with pytest.raises(ConfigError, match="2048.*1024"):
        run_recipe(write_recipe(decoder, "answer", tmp_path / "out", window=2048))


def test_a_time_limit_saves_a_checkpoint_and_the_same_command_goes_on(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = {"steps": 4, "batch_size": 2, "save_every": 2}
    whole, cut = (str(write_recipe(decoder, "adapter", tmp_path / name, optim)) for name in ("whole", "cut"))
    assert main(["train", whole]) == 0
    capsys.readouterr()
    assert main(["train", cut, "--minutes", "0", "--no-resume"]) == 0
    assert capsys.readouterr().out.strip().endswith("without --no-resume")
    assert main(["train", cut, "--minutes", "0.001"]) == 0  # the decoder alone takes longer to load
    assert re.search("stopped at step [123] of 4", capsys.readouterr().out)
    assert not (tmp_path / "cut" / "training_report.json").exists()
    assert main(["train", cut]) == 0
    assert report(tmp_path / "cut")["resumed"] is True
    assert report(tmp_path / "cut")["tokens"] == report(tmp_path / "whole")["tokens"]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_speed_is_the_typical_one_and_padding_does_not_count() -> None:
    batch = {"input_ids": torch.ones(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 4 + [0] * 4])}
    assert count_batch_tokens(batch) == 12
    history = [{"tokens": n * 1000, "seconds": s} for n, s in ((0, 0.0), (1, 9.0), (2, 10.0), (3, 11.0), (4, 12.0))]
    assert speed_report(history)["tokens_per_second"] == 1000  # the slow first interval compiles


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_full_copy_of_a_bfloat16_decoder_is_trained_in_float32(make_tiny_bundle: Any, side: str) -> None:
    """1e-5 of a weight of 1 is lost in bfloat16; what the copy shares is as it was."""
    plain = make_tiny_bundle(encoder={"mode": "full"}, decoder={"mode": "full"})
    other = "decoder" if side == "encoder" else "encoder"
    method = plain.config.method.model_copy(update={other: TuneConfig(mode="frozen")})
    config = plain.config.model_copy(update={"method": method})
    bundle = Bundle.build(config, Backbone(plain.backbone.model.to(torch.bfloat16), plain.tokenizer))
    objective = DistillationLoss(bundle)
    trained = [p for p in objective.parameters() if p.requires_grad]
    assert trained and {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in bundle.backbone.model.parameters()} == {torch.bfloat16}
    batch = DistillationCollator(TrainingPromptBuilder(bundle.tokenizer), ["{context} {question}"], 64, 0)(
        world_examples("train", 2, 2, max_turns=1, passages=(1,))
    )
    with torch.autocast("cpu", torch.bfloat16):
        objective(**batch)["loss"].backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in trained)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(0, 200))
def test_passages_share_what_others_leave(lengths: list[int], total: int) -> None:
    kept = passage_token_shares(lengths, total)
    assert all(0 <= k <= n for k, n in zip(kept, lengths, strict=True))
    assert sum(kept) == min(total, sum(lengths))  # nothing that is needed is wasted
    cut = [k for k, n in zip(kept, lengths, strict=True) if k < n]
    assert not cut or (max(cut) - min(cut) <= 1 and min(cut) >= max(kept) - 1)


def test_a_question_that_names_a_place_is_left_as_it_is() -> None:
    [message] = question_messages("{context}\n{question}", "a {question} b", "What is {context}?")
    assert message["content"] == "a {question} b\nWhat is {context}?"

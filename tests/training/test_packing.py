"""Packed rows, the head's loss on chosen positions, and stage repeat_and_answer, against plain computations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from benchmarks.decoders.build import tiny_model, tiny_tokenizer
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.mean_pooling import MeanPoolingCompressor
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.training.engine.packing import PADDING, RowPacker, keeps_apart, packed_loss
from ctx_compress_rag.training.objective import TrainingBatch
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, recitation_example
from ctx_compress_rag.training.run import parse_recipe, run_recipe
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.stages.compression import bundle_to_train
from ctx_compress_rag.training.stages.repeat_and_answer import (
    REPEAT_TEMPLATES,
    PackedSlotData,
    PackedSlotLoss,
    RepeatAndAnswerRecipe,
    reading_losses,
)
from helpers.architectures import SLIDING_WINDOW, bos, model, tokenizer
from helpers.models import draw_lora, tiny_config
from helpers.ram import EXAMPLES
from helpers.training import losses, report, settings_of


@given(st.lists(st.integers(1, 12), max_size=20), st.integers(1, 4))
def test_every_sequence_that_fits_stands_whole_in_one_row(lengths: list[int], rows: int) -> None:
    packer = RowPacker(rows, 16)
    placed: dict[int, torch.Tensor] = {}
    for number, length in enumerate(lengths, 1):
        if packer.fits(length):
            ids = torch.arange(length) + 100 * number
            placed[packer.add(ids)] = ids
    packed = packer.packed
    assert packed.token_count == sum(map(len, placed.values()))
    for number, (start, ids) in enumerate(placed.items()):
        place = slice(start, start + len(ids))
        assert torch.equal(packed.input_ids.flatten()[place], ids)
        assert (packed.segments.flatten()[place] == number).all()
        assert start // 16 == (start + len(ids) - 1) // 16
        assert torch.equal(packed.positions.flatten()[place], torch.arange(len(ids)))
    assert int((packed.segments == PADDING).sum()) == rows * 16 - packed.token_count


@pytest.mark.parametrize(
    ("name", "packs"),
    [
        *((name, True) for name in ("cohere", "gemma2", "granite", "hyperclovax", "llama", "modernbert-decoder")),
        *((name, False) for name in ("falcon_h1", "gpt_oss", "lfm2", "opt", "qwen3_5_text")),
    ],
)
def test_packed_sequences_are_read_as_if_alone(name: str, packs: bool) -> None:
    """The loss on their last two tokens is transformers' own, and both kinds of targets have the same share."""
    decoder = tiny_model(name)
    packer = RowPacker(2, 22)
    losses: tuple[list[Tensor], ...] = ([], [])
    for length, kind in zip((5, 14, 3, 12), (0, 1, 1, 1), strict=True):
        row = torch.randint(5, 380, (length,), generator=torch.Generator().manual_seed(length))
        packer.add(row, torch.arange(len(row)) >= len(row) - 2, kind)
        with torch.no_grad():
            logits = decoder(input_ids=row[None], use_cache=False).logits[0].float()
        losses[kind].append(F.cross_entropy(logits[-3:-1], row[-2:]))
    packed = packer.packed
    assert keeps_apart(decoder) == packs
    if not packs:
        packed, moved = packed.apart()
        assert torch.equal(packer.packed.input_ids.flatten()[:5], packed.input_ids.flatten()[moved[:5]])
    with torch.no_grad():
        found = packed_loss(decoder, packed, inputs_embeds=decoder.get_input_embeddings()(packed.input_ids))
    wanted = torch.stack([torch.stack(each).mean() for each in losses]).mean()
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def settings_for(decoder: Path, tmp_path: Path, stage: str = "packed", **changes: Any) -> dict[str, Any]:
    write_jsonl(tmp_path / "questions.jsonl", EXAMPLES)
    own = {"method": {"name": "mean_pooling", "embedding_skip": True, "hidden_map": True, "positions": 4, "layers": 1}}
    settings = {
        "window": 256,
        "packing": {"rows": 2, "passage_rows": 2, "length": 256, "examples": 2},
        "data": {"files": [str(tmp_path / "questions.jsonl")]},
        **(own if stage == "packed" else {"window": None}),
    }
    return settings_of(decoder, stage, tmp_path / "run", {"steps": 3, "batch_size": 1}, **settings | changes)


def recipe(decoder: Path, tmp_path: Path, **changes: Any) -> RepeatAndAnswerRecipe:
    made = parse_recipe(settings_for(decoder, tmp_path, **changes), "test")
    assert isinstance(made, RepeatAndAnswerRecipe)
    return made


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])  # others: the trial in tests/models/test_decoders.py
def test_packed_prompts_have_the_loss_of_unpacked_ones(name: str, packs: bool, decoder: Path, tmp_path: Path) -> None:
    """With a BOS before each passage and prompt, windows shorter than both, and scaled embeddings."""
    made = recipe(decoder, tmp_path, ratios=[4], repeat=[{"step": 0, "share": 0.0}])
    config = tiny_config(method=made.method, base_ratio=4)
    bundle = Bundle.build(config, Backbone(model(name), tokenizer(name)))
    assert isinstance(bundle.compressor, MeanPoolingCompressor) and bundle.compressor.hidden_map is not None
    torch.nn.init.normal_(bundle.compressor.hidden_map.weight, std=0.1)
    draw_lora(bundle.backbone.model, 0.1)
    builder = TrainingPromptBuilder(bundle.tokenizer)
    batch = PackedSlotData(builder, EXAMPLES, ["salt"], made)[0]
    for rows in (batch.passages, batch.prompts):
        begin = rows.input_ids[(rows.positions == 0) & (rows.segments != PADDING)]
        assert not bos(name) or begin.tolist() == bos(name) * len(begin)
        assert int(rows.positions.max()) > SLIDING_WINDOW and len(begin) > 1
    plain, packed = LikelihoodLoss(bundle), PackedSlotLoss(bundle)
    assert packed.packs
    packed.packs = packs
    plain.ratios = [4]
    collated = AnswerCollator(builder, made.data.templates, 256, made.seed)(EXAMPLES)
    before = bundle.backbone.own_state()
    loss = packed(batch)["loss"]
    torch.testing.assert_close(loss, plain(**collated)["loss"], atol=1e-5, rtol=1e-5)
    loss.backward()
    torch.optim.SGD(packed.parameters(), lr=1.0).step()
    after = bundle.backbone.own_state()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_batches_hold_what_was_asked_for(decoder: Path, tmp_path: Path, tiny_tokenizer: Any) -> None:
    made = recipe(decoder, tmp_path)
    data = PackedSlotData(TrainingPromptBuilder(tiny_tokenizer), EXAMPLES, ["A goat lives in Kormoor."], made)
    for number in range(8):
        batch, again = data[number], data[number]
        assert torch.equal(batch.prompts.input_ids, again.prompts.input_ids)
        # Every slot has a place, one to eight tokens, and tokens of one passage.
        counts = torch.bincount(batch.slots)
        assert len(counts) == len(batch.places) and counts.min() >= 1 and counts.max() <= 8
        segments = batch.passages.segments.flatten()[batch.sources]
        for slot in range(len(counts)):
            assert len(set(segments[batch.slots == slot].tolist())) == 1
        assert not batch.prompts.targets.flatten()[batch.places].any()


def test_whether_slots_are_read_is_logged(decoder: Path, tmp_path: Path) -> None:
    """The plain likelihood of repeating a text from its own slots and from another's; texts alone can be trained on."""
    (tmp_path / "text.txt").write_text("Orla keeps a goat.\nKormoor lies on the river.\nPell trades in salt.\n")
    texts = {"texts": [{"file": str(tmp_path / "text.txt"), "words": 3}]}
    settings = settings_for(decoder, tmp_path, data=texts, repeat=[{"step": 0, "share": 1.0}])
    settings["optim"] |= {"log_every": 2, "save_every": 3}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    logged = json.loads((run_recipe(tmp_path / "recipe.yaml") / "loss.json").read_text())
    said = report(tmp_path / "run")
    assert said["encoder"] == "looks ahead" and "unpacked" not in said and not said["adapters"]["reader"]["left_out"]
    assert [(row["step"], "right" in row) for row in logged] == [(2, False), (3, True)]
    bundle = Bundle.from_pretrained(tmp_path / "run" / "bundle", device="cpu")
    draw_lora(bundle.backbone.model, 0.1)
    passages = ["Orla keeps a goat.", "Pell trades in salt."]
    found = reading_losses(bundle, passages, 4)
    plain = LikelihoodLoss(bundle)
    plain.ratios = [4]
    builder = TrainingPromptBuilder(bundle.tokenizer)
    collate = AnswerCollator(builder, [REPEAT_TEMPLATES[0]], 256, 0, recites=True)
    batch = collate([recitation_example(passage) for passage in passages])
    assert found["right"] == pytest.approx(float(plain(**batch)["loss"].detach()), rel=1e-5)
    batch["prompts"] = TrainingBatch(batch["prompts"].prompts, [[1], [0]])
    assert found["wrong"] == pytest.approx(float(plain(**batch)["loss"].detach()), rel=1e-5)
    with pytest.raises(ConfigError, match=r"data.files"):
        recipe(decoder, tmp_path, data=texts)


@pytest.mark.parametrize("stage", ["packed", "adapter"])
def test_a_step_takes_several_sets_of_rows(decoder: Path, tmp_path: Path, stage: str) -> None:
    """One at a time, whatever the micro-batches: their losses' mean."""
    settings = settings_for(decoder, tmp_path, stage)

    def curve(steps: int, batch_size: int, **optim: Any) -> list[float]:
        # At a rate that leaves the weights as they are: every set of rows is seen by the same ones.
        optim |= {"steps": steps, "batch_size": batch_size, "learning_rate": 1e-12, "final_learning_rate": 0.0}
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(settings | {"optim": optim | {"log_every": 1}}))
        return losses(run_recipe(file, resume=False))

    one, other = curve(2, 1)
    assert curve(1, 2, micro_batch_size=2) == pytest.approx([(one + other) / 2], rel=1e-4)


def test_impossible_recipes_are_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"128.*256"):
        recipe(decoder, tmp_path, window=128)
    with pytest.raises(ConfigError, match="repeat"):
        recipe(decoder, tmp_path, repeat=[])
    narrow = settings_for(decoder, tmp_path, "adapter", packing={"rows": 1, "length": 8, "examples": 1})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(narrow))
    with pytest.raises(ConfigError, match="packing"):
        run_recipe(tmp_path / "recipe.yaml")
    made = recipe(decoder, tmp_path, method={"name": "compression_tokens"})
    with pytest.raises(ConfigError, match="not for compression_tokens"):
        PackedSlotLoss(bundle_to_train(made, EXAMPLES))


@pytest.mark.parametrize("stage", ["packed", "adapter"])
def test_the_report_says_what_a_decoder_does_not_admit(tmp_path: Path, stage: str) -> None:
    """Mamba 2 has a state that runs through a row, no mask to lift, and kernels that read a weight past its adapter."""
    tiny_model("mamba2").save_pretrained(tmp_path / "mamba2")
    tiny_tokenizer().save_pretrained(tmp_path / "mamba2")
    packing = {"rows": 2, "length": 256, "examples": 2} | ({"passage_rows": 2} if stage == "packed" else {})
    settings = settings_for(tmp_path / "mamba2", tmp_path, stage, packing=packing)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    said = report(run_recipe(tmp_path / "recipe.yaml"))
    assert "Mamba2ForCausalLM" in said["unpacked"]
    assert ("encoder" in said) == (stage == "packed") and said.get("encoder", "causal").startswith("causal")
    for adapter in said["adapters"].values():
        (names,) = adapter["left_out"].values()
        assert names[0].endswith("out_proj")

"""RAM's training (Read As Human, section 3.2): what it reaches, its rows and positives, its recipe and bundles."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.data.examples import Example, Turn, read_jsonl, write_jsonl
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.methods.ram.compressor import RamConfig
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.stages.ram import RamCollator, RamLoss
from helpers.ram import EXAMPLES, PLAIN, collator, objective, plain_ids, ram_bundle


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return ram_bundle(tiny_tokenizer)


def test_the_choice_itself_passes_no_gradient(tiny_tokenizer: Any) -> None:
    """Without skimmed vectors the encoder learns from the contrastive loss alone."""
    made = ram_bundle(tiny_tokenizer, skimming="none", decoder={"mode": "full"})
    assert made.reader.projection is None
    for contrastive in (False, True):
        loss = objective(made, contrastive=contrastive)
        loss(**collator(made)(EXAMPLES))["loss"].backward()
        grads = [p.grad for p in made.compressor.parameters() if p.requires_grad]
        assert grads and any(g is not None and bool(g.any()) for g in grads) == contrastive
        assert any(p.grad is not None and bool(p.grad.any()) for p in made.reader.parameters())


def test_a_reduction_is_drawn_for_each_question(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    choose = bundle.compressor.choose
    monkeypatch.setattr(bundle.compressor, "choose", lambda *args: drawn.append(args[3]) or choose(*args))
    loss = objective(bundle)
    loss.ratios = [2, 4, 8]
    with torch.no_grad():
        for examples in ([EXAMPLES], [[example] for example in EXAMPLES]):  # whole, and in micro-batches
            for loss.step in range(6):
                for micro in examples:
                    loss(**collator(bundle)(micro))
    assert set(drawn) == {2, 4, 8}
    assert len(set(drawn[:3])) > 1
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]


def test_each_question_is_a_prompt_and_each_passage_read_once(bundle: Bundle) -> None:
    batch = collator(bundle)(EXAMPLES)
    assert [p.text for p in batch["passages"]] == list(EXAMPLES[0].passages)
    assert [row.passages for row in batch["rows"]] == [[0, 1], [1], [1]]
    assert [row.example.turns for row in batch["rows"]] == [(t,) for e in EXAMPLES for t in e.turns]
    assert [any(row.positives) for row in batch["rows"]] == [True, True, False]
    with pytest.raises(DataError, match="no tokens"):
        collator(bundle)([Example(("text",), (Turn("", ("text",)),))])


def test_a_long_context_is_cut(bundle: Bundle) -> None:
    builder = TrainingPromptBuilder(bundle.tokenizer)
    long = Example(("Kormoor lies on the river Halen. " * 40, "Dun."), (Turn("Which river?", ("Halen",)),))
    batch = RamCollator(builder, [PLAIN], 64, seed=0, segment_tokens=4)([long])
    short = len(plain_ids(bundle, "Dun."))
    assert [sum(p.token_counts) for p in batch["passages"]] == [64 - short, short]
    crowded = Example(tuple(f"{name} lies on the Halen." for name in ("Dun", "Pell", "Ost")), long.turns)
    batch = RamCollator(builder, [PLAIN], 2, seed=0, segment_tokens=4)([crowded])  # no room for the third
    assert sum(p.token_count for p in batch["passages"]) == 2
    with torch.no_grad():
        assert objective(bundle)(**batch)["loss"].isfinite()


def test_stage_ram_refuses_other_methods(make_tiny_bundle: Any) -> None:
    other = make_tiny_bundle()
    with pytest.raises(ConfigError, match="mean_pooling"):
        RamLoss(other, TrainingPromptBuilder(other.tokenizer))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing to read"):
        RamConfig(close_reading=False, skimming="none")
    shape = {"name": "x", "method": RamConfig(), "max_tokens": 1000}
    assert BundleConfig(**shape, base_ratio=50, ratios=[2, 3, 32]).ratios == [2, 3, 32]
    with pytest.raises(ValueError, match="segment of 50 tokens"):
        BundleConfig(**shape, base_ratio=4, ratios=[2])
    with pytest.raises(ValueError, match="ratio of 2 or more"):
        BundleConfig(**shape, base_ratio=50, ratios=[1, 2])


def test_yes_and_no_make_no_positives(tiny_tokenizer: Any) -> None:
    """The word 'no' stands in many a text that does not answer with it."""
    text = "There is no doubt about it. Ada said yes."
    collate = RamCollator(
        TrainingPromptBuilder(tiny_tokenizer), ["{context} {question}"], 512, seed=0, segment_tokens=4
    )
    rows = collate([Example((text,), (Turn("Was it so?", ("No",)), Turn("Who said it?", ("Ada",))))])["rows"]
    assert not any(rows[0].positives)
    assert any(rows[1].positives)


def test_evidence_makes_positives(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Marked parts of a passage, to the letter, in place of the answer, which stands elsewhere, too, or nowhere."""
    passage = "Ada was there. Bo said that Ada won the cup. Ada left, and ada is no name."
    rows = [
        {"question": "Who won?", "answers": ["Ada"], "context": ["No part.", passage], "evidence": ["that Ada won"]},
        {"question": "Did she?", "answers": ["yes"], "context": ["No part.", passage], "evidence": ["won the cup."]},
        {"question": "Who won?", "answers": ["Ada"], "context": ["No part.", passage]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    examples = read_jsonl(file, max_turns=3)
    assert write_jsonl(tmp_path / "again.jsonl", examples) == 3
    assert read_jsonl(tmp_path / "again.jsonl", max_turns=3) == examples
    collate = RamCollator(
        TrainingPromptBuilder(tiny_tokenizer), ["{context} {question}"], 512, seed=0, segment_tokens=2
    )
    batch = collate(examples)
    bounds = [(p.text, a, b) for p in batch["passages"] for a, b in pairwise(p.bounds)]
    start = passage.index("that Ada won")
    said = [[(start, start + 12)], [(start + 9, start + 21)], [m.span() for m in re.finditer("Ada|ada", passage)]]
    for row, spans in zip(batch["rows"], said, strict=True):
        touched = [text == passage and any(a < end and b > begin for begin, end in spans) for text, a, b in bounds]
        assert row.positives == touched and 0 < sum(touched) < len(touched)
    for wrong, fault in (("that Ada won", "evidence: .*'that Ada won'"), ([" "], "' '"), (["ada won"], "'ada won'")):
        rows[0]["evidence"] = wrong
        file.write_text(json.dumps(rows[0]))
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{fault}"):
            read_jsonl(file)


@pytest.mark.parametrize("tied", [True, False])
def test_full_tuning_leaves_the_embeddings_and_a_head_tied_to_them(tiny_tokenizer: Any, tied: bool) -> None:
    made = ram_bundle(tiny_tokenizer, decoder={"mode": "full"}, tied=tied)
    own = made.reader.own
    trained = {id(p) for p in made.reader.trained_parameters()}
    frozen = {name for name, p in own.named_parameters() if id(p) not in trained}
    assert frozen == {"model.embed_tokens.weight"}
    assert (own.lm_head.weight is made.backbone.embeddings.weight) == tied
    assert (id(own.lm_head.weight) in trained) != tied

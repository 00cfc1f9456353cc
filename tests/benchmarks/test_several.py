"""Several passages: prompts, the loss on attention, and thresholds, against plain computations."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scoring.confidence import Sure, best_threshold
from benchmarks.several import losses
from benchmarks.several.neighbors import NEAREST, among_neighbors
from benchmarks.world.world import world_examples
from ctx_compress_rag.models.sentence_embedding import passage_vectors
from ctx_compress_rag.text.answers import mentions_answer
from ctx_compress_rag.training.prompts import PromptBuilder
from helpers.models import draw_lora, tiny_llama

ROOT = Path(__file__).parents[2]


def test_distractors_are_the_nearest_passages_without_the_answer() -> None:
    examples = world_examples("test", 0, 60, 1, (1,))
    passages = list(dict.fromkeys(e.passages[0] for e in examples))
    vectors = passage_vectors(passages)
    several = 0
    for before, after in zip(examples, among_neighbors(examples, [1, 3]), strict=True):
        own = before.passages[0]
        others = [passage for passage in after.passages if passage != own]
        assert len(others) == len(after.passages) - 1
        cosines = vectors @ vectors[passages.index(own)]
        near = sorted(passages, key=lambda p: -cosines[passages.index(p)])[: NEAREST + 1]
        assert all(passage in near and not mentions_answer(passage, before.turns[0].answers) for passage in others)
        assert all(part in own and before.turns[0].answers[0] in part for part in after.turns[0].evidence)
        several += len(others) == 2
    assert 10 < several < 50


def test_attention_is_that_of_transformers(tiny_tokenizer: Any) -> None:
    model = tiny_llama(tiny_tokenizer, num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    future = torch.full((9, 9), float("-inf")).triu(1)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(losses, "HEADS", ((0, 3), (1, 1)))
        with losses.attention_inputs(model) as seen:
            wanted = model(ids, output_attentions=True).attentions
        for layer, head in losses.HEADS:
            scores = losses.attention_scores(model, layer, head, *seen[layer])
            torch.testing.assert_close((scores + future).softmax(-1), wanted[layer][:, head])


def test_evidence_has_less_loss_the_more_attention_its_slots_get(
    make_tiny_bundle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "HEADS", ((0, 0), (1, 1)))
    bundle = make_tiny_bundle()
    draw_lora(bundle.backbone.model, std=0.1)
    examples = among_neighbors(world_examples("test", 1, 6, 2, (1,)), [3])
    collate = losses.SeveralCollator(PromptBuilder(bundle.tokenizer), [bundle.config.template], 999, 0, quote=True)
    batch = collate(examples)
    spans = [span for own in batch["evidence"] for span in own]
    for (number, first, last), (example, turn) in zip(spans, [(e, t) for e in examples for t in e.turns], strict=True):
        ids = bundle.tokenizer(example.passages[number], add_special_tokens=False).input_ids[first : last + 1]
        assert turn.evidence[0] in bundle.tokenizer.decode(ids)
    assert len(batch["quotes"].prompts) == len(examples)
    loss = losses.SeveralLoss(bundle, attention=1.0)
    loss.ratios = [4]

    def looks() -> torch.Tensor:
        slots = loss.compress(batch["passages"], [4])[4]
        return torch.stack(loss.read(batch["prompts"], slots, batch["evidence"], 4)[2])

    with torch.no_grad():
        before = looks()
    assert len(before) == len(losses.HEADS) * len(spans)
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=1e-4)
    looks().mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert looks().mean() < before.mean()


def test_no_threshold_scores_higher_than_the_best() -> None:
    draw = random.Random(0)
    for _ in range(50):
        answers = [Sure(draw.gauss(0, 1), draw.random(), draw.random() < 0.5) for _ in range(draw.randint(1, 12))]
        best = sum(a.score(best_threshold(answers)) for a in answers)
        for threshold in (-9.0, *(draw.gauss(0, 1) for _ in range(30)), 9.0):
            declining = [a.logprob < threshold for a in answers]
            scores = [float(not a.answerable) if d else a.f1 for d, a in zip(declining, answers, strict=True)]
            assert sum(scores) <= best + 1e-9

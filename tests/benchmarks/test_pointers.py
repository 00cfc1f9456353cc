"""Supervised attention: where tokens are told to look, and the loss against transformers' own attention maps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.world import BUNDLE as DEMO
from benchmarks.world.pointers import Pointers, PointingHeads, pointers_of
from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.text.templates import TEMPLATES
from ctx_compress_rag.training.prompts import PromptBuilder

SHAPE: dict[str, Any] = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TARGETS = [(0, 10, 3, 5), (1, 19, 0, 0), (2, 7, 6, 7), (0, 4, 4, 4)]


@pytest.mark.parametrize(("model_class", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_the_loss_is_that_of_the_attention_maps(model_class: Any, config: Any) -> None:
    """-log of the attention that transformers' eager attention reports, head 0, summed over the targets."""
    torch.manual_seed(0)
    model = model_class(config(**SHAPE)).eval()
    ids = torch.randint(0, 64, (3, 20))
    pointers = Pointers.of(TARGETS)
    heads = PointingHeads(model, (0, 2))
    with heads.watching():
        model(input_ids=ids, use_cache=False)
        losses = [heads.loss(which, pointers).item() for which in (0, 1)]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    maps = eager(input_ids=ids, output_attentions=True).attentions
    for which, layer in enumerate((0, 2)):
        seen = [
            -math.log(maps[layer][row, 0, position, first : last + 1].sum().item())
            for row, position, first, last in TARGETS
        ]
        assert losses[which] == pytest.approx(sum(seen) / 4, rel=1e-4)


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_point_to_the_name_and_the_fact_of_the_question(template: str) -> None:
    """Whatever is pointed to decodes to the subject's name, or to the answer's token inside the right passage.

    The demo's tokenizer puts a space before a text: a passage's first word is then other tokens inside a prompt.
    """
    tokenizer = Bundle.from_pretrained(DEMO).backbone.tokenizer
    builder = PromptBuilder(tokenizer)
    named = 0
    for example in world_examples("train", 77, 24, 12, [1, 2, 4]):
        prompt, names, copies = pointers_of(builder, example, template)
        ids, text = prompt.ids(), builder.text_prompt(example, template)
        assert torch.equal(ids, text.ids()) and torch.equal(prompt.answers, text.answers)
        subjects = {turn.subject for turn in example.turns if turn.subject}
        for position, first, last in names:
            assert last < position and tokenizer.decode(ids[first : last + 1]).strip() in subjects
        for position, first, last in copies:
            assert first == last < position
            # What stands after the position is an answer's token, and is what the position copies.
            assert prompt.answers[position + 1] and ids[position + 1] == ids[first]
        named += len(names)
        by_answer = [turn for turn in example.turns if turn.subject]
        assert len(copies) >= len(by_answer)  # an answer has at least one token
        for turn in by_answer:
            [passage] = [p for p in example.passages if turn.subject in p.split(". ")[0]]
            assert turn.answers[0] in passage
    assert named > 500

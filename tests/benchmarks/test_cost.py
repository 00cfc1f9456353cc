"""What a question costs: operations against the matrix products written out, times of prompts that take theirs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing.cost import measure
from benchmarks.world.world import world_examples
from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.evaluation.answering import FULL, SOFT, question_chat
from ctx_compress_rag.evaluation.questions import questions_of
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.text.templates import TEMPLATES

LAYERS, WIDTH = 2, 32


def linear(model: Any) -> int:
    """Weights that every token is multiplied with; a frozen decoder's, without its head."""
    return sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj") and "lora" not in n)


def reading(model: Any, tokens: int) -> int:
    """Operations of layers that read so many tokens."""
    return 2 * tokens * linear(model) + LAYERS * 2 * 2 * tokens * tokens * WIDTH


def test_operations_are_those_of_the_matrix_products(tiny_bundle: Any, tmp_path: Path) -> None:
    """Full text: layers and the head at one position; slots: also LoRA and the linear map, but of no passage's text."""
    model = tiny_bundle.backbone.model
    head = 2 * len(tiny_bundle.tokenizer) * WIDTH
    passages = questions_of(world_examples("test", 0, 1, max_turns=1, passages=(3,)))[0].passages
    with SoftContextStore(tmp_path, tiny_bundle) as store:
        store.add(list(passages), progress=False)
        decoder = Decoder(tiny_bundle, store)

        def given(texts: Any) -> Any:
            return question_chat(TEMPLATES[0], texts(), "What is it about?")

        makers = {
            FULL: partial(given, lambda: passages),
            SOFT: partial(given, lambda: mark_texts(store, passages, ratio=8)),
        }
        costs = measure(decoder, [makers], progress=False)
        length = {name: decoder.preparer.count_chat_tokens(make()) for name, make in makers.items()}
        slots = sum(soft.merge(2).n_slots for soft in tiny_bundle.compress(list(passages)))
    assert costs[FULL].context_flops == costs[SOFT].context_flops == 0
    assert costs[FULL].first_token_flops == pytest.approx(reading(model, length[FULL]) + head, rel=1e-3)
    lora = 2 * length[SOFT] * sum(p.numel() for p in tiny_bundle.reader.trained_parameters() if p.ndim == 2)
    map_ = 2 * (slots - length[SOFT]) * WIDTH * WIDTH  # the map is among those parameters, and reads slots alone
    assert costs[SOFT].first_token_flops == pytest.approx(reading(model, length[SOFT]) + head + lora + map_, rel=1e-3)

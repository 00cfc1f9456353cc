"""Imported bundles do what the projects' own code does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.evaluation.answering import question_chat
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.prompt import Prompt
from helpers.published import CHECKPOINTS, FIRST, TEXTS


def reference(name: str) -> dict[str, Tensor]:
    """What the project's own code made, see benchmarks/published/make_references.py."""
    kind = "-first" if name in FIRST else ""
    return load_file(CHECKPOINTS / name.removesuffix("-first") / f"reference{kind}.safetensors")


def asked(bundle: Bundle, folder: Path, texts: list[str]) -> Prompt:
    """The prompt that asks about texts through a store, with slots that no codec has rounded."""
    with SoftContextStore(folder, bundle) as store:
        decoder = Decoder(bundle, store)
        chat = question_chat(bundle.config.template, mark_texts(store, texts), TEXTS["question"])
        [prompt] = decoder.preparer.prepare([chat])
    exact = iter([bundle.embed(soft) for soft in bundle.compress(texts)])
    pieces = tuple(next(exact) if piece.is_floating_point() else piece for piece in prompt.pieces)
    return replace(prompt, pieces=pieces)


def answered(bundle: Bundle, prompt: Prompt, vocabulary: int, tokens: int) -> tuple[Tensor, list[int]]:
    """The logits after a prompt, and the likeliest tokens, one by one, of the first `vocabulary`."""
    batch = splice_prompts(bundle.backbone.embeddings, [prompt])
    inputs, found = batch.inputs_embeds, []
    with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
        for _ in range(tokens):
            found.append(model(inputs_embeds=inputs, use_cache=False).logits[0, -1, :vocabulary])
            inputs = torch.cat([inputs, bundle.backbone.embeddings(found[-1].argmax().view(1, 1))], dim=1)
    return found[0], [int(logits.argmax()) for logits in found]


def test_vectors_are_those_of_the_projects_own_code(name: str, bundle: Bundle) -> None:
    """Of a text shorter than a window, and of one longer than several."""
    expected = reference(name)
    for text in ("short", "long"):
        [soft] = bundle.compress([TEXTS[text]])
        assert (soft.slots - expected[f"{text}.slots"]).abs().max() < 1e-5
        if f"{text}.vectors" in expected:
            mapped = bundle.reader.projection(soft.slots)  # type: ignore[operator]
            assert (mapped - expected[f"{text}.vectors"]).abs().max() < 1e-5


@pytest.mark.parametrize("passages", TEXTS["prompts"])
def test_prompts_logits_and_answers_are_those_of_the_projects_own_code(
    name: str, bundle: Bundle, passages: str, tmp_path: Path
) -> None:
    expected = reference(name)
    if f"{passages}.logits" not in expected:
        pytest.skip("its own code reads one passage")
    prompt = asked(bundle, tmp_path, TEXTS["prompts"][passages])
    if name.startswith("icae"):
        # Its script has the ids around the slots; the first after them is the marker, a vector here.
        before, _, after = prompt.pieces
        assert torch.equal(before, expected["one.left"]) and torch.equal(after, expected["one.right"][1:])
    else:
        vectors = prompt.vector_mask()
        wrapped = name.startswith("lclm")  # there, the wrapping vectors are tokens of the prompt
        assert prompt.length == len(expected[f"{passages}.ids"])
        assert torch.equal(prompt.ids()[~vectors], expected[f"{passages}.ids"][~vectors])
        assert int(vectors.sum()) == prompt.slots and (prompt.slots > len(TEXTS["prompts"][passages])) is (
            wrapped or not name.startswith("xrag")
        )
    logits, ids = answered(bundle, prompt, len(expected[f"{passages}.logits"]), len(expected[f"{passages}.answer"]))
    assert (logits - expected[f"{passages}.logits"]).abs().max() < 1e-4
    assert ids == expected[f"{passages}.answer"].tolist()


def test_other_ratios_than_the_trained_one_are_refused(name: str, bundle: Bundle) -> None:
    other = bundle.config.base_ratio * 2
    with pytest.raises(RatioError, match=f"{other}"):
        bundle.compress([TEXTS["short"]], other)

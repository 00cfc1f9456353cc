"""Imported bundles do what the projects' own code does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctx_compress_rag import Bundle
from ctx_compress_rag.errors import RatioError
from helpers.published import TEXTS, answered, asked, reference


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
    if name == "icae":
        # Its script has the ids around the slots; the first after them is the marker, a vector here.
        before, _, after = prompt.pieces
        assert torch.equal(before, expected["one.left"]) and torch.equal(after, expected["one.right"][1:])
    else:
        vectors = prompt.vector_mask()
        wrapped = name.startswith("lclm")  # there, the wrapping vectors are tokens of the prompt
        assert prompt.length == len(expected[f"{passages}.ids"])
        assert torch.equal(prompt.ids()[~vectors], expected[f"{passages}.ids"][~vectors])
        assert int(vectors.sum()) == prompt.slots and (prompt.slots > len(TEXTS["prompts"][passages])) is (
            wrapped or name != "xrag"
        )
    logits, ids = answered(bundle, prompt, len(expected[f"{passages}.logits"]), len(expected[f"{passages}.answer"]))
    assert (logits - expected[f"{passages}.logits"]).abs().max() < 1e-4
    assert ids == expected[f"{passages}.answer"].tolist()


def test_other_ratios_than_the_trained_one_are_refused(name: str, bundle: Bundle) -> None:
    other = bundle.config.base_ratio * 2
    with pytest.raises(RatioError, match=f"{other}"):
        bundle.compress([TEXTS["short"]], other)

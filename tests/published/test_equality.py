"""Imported bundles do what the projects' own code does, and each plausible mistake would be seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag import Bundle, RatioError
from helpers.published import TEXTS, answered, asked, imported, reference


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


WRONG: dict[str, dict[str, dict[str, Any]]] = {
    "pisco": {
        "alpha": {"encoder": {"rank": 16, "alpha": 16}},
        "no beginning": {"begin": False},
        "no end": {"eos": False},
        "no BOS": {"bos": "never"},
    },
    "icae": {"alpha": {"encoder": {"rank": 64, "alpha": 64}}, "no BOS": {"bos": "never"}, "full": {"equal": False}},
    "lclm-4x": {"last": {"pooling": "last"}},
    "xrag": {"no BOS": {"bos": False}, "no end": {"eos": False}, "mean": {"pooling": "mean"}},
}


@pytest.mark.parametrize(("name", "mistake"), [(name, each) for name, own in WRONG.items() for each in own])
def test_a_mistake_in_the_text_side_shows(name: str, mistake: str, tmp_path: Path) -> None:
    """Far beyond rounding, or in the number of slots."""
    bundle = imported(name, tmp_path / "bundle")
    expected = [soft.slots for soft in bundle.compress([TEXTS["short"], TEXTS["long"]])]
    config = bundle.compressor.config
    changed = config.model_validate(config.model_dump() | WRONG[name][mistake])
    bundle.compressor.config = changed
    if "begin" in WRONG[name][mistake]:
        bundle.compressor.begin = torch.nn.Parameter(bundle.compressor.begin[:0])  # type: ignore[index]
    if "encoder" in WRONG[name][mistake]:
        scale = WRONG[name][mistake]["encoder"]["alpha"] / config.encoder.alpha
        for parameter, value in bundle.backbone.model.named_parameters():
            if "lora_B.compressor" in parameter:
                value.data *= scale
    found = [soft.slots for soft in bundle.compress([TEXTS["short"], TEXTS["long"]])]
    pairs = list(zip(found, expected, strict=True))
    assert any(a.shape != b.shape or (a - b).abs().max() > 1e-2 for a, b in pairs)


def test_swapped_or_untrained_adapters_show(tmp_path: Path) -> None:
    """The second is what CLaRa's own loader makes of an Instruct checkpoint's settings."""
    bundle = imported("clara-instruct", tmp_path / "bundle")
    folder = tmp_path / "bundle"
    shutil.copytree(folder, tmp_path / "swapped")
    for part, other in (("compressor", "reader"), ("reader", "compressor")):
        weights = "adapter_model.safetensors"
        shutil.copy(folder / part / weights, tmp_path / "swapped" / other / weights)
    swapped = Bundle.from_pretrained(tmp_path / "swapped", device="cpu", dtype="float32")
    [one], [other_soft] = bundle.compress([TEXTS["short"]]), swapped.compress([TEXTS["short"]])
    assert (one.slots - other_soft.slots).abs().max() > 0.5
    prompt = asked(bundle, tmp_path / "store", [TEXTS["short"]])
    logits, _ = answered(bundle, prompt, 500, 1)
    with torch.no_grad():
        for parameter, value in bundle.backbone.model.named_parameters():
            if "lora_B.reader" in parameter:
                value.zero_()
    untrained, _ = answered(bundle, prompt, 500, 1)
    assert (logits - untrained).abs().max() > 0.5


def test_without_the_vectors_around_slots_answers_change(name: str, bundle: Bundle, tmp_path: Path) -> None:
    if getattr(bundle.reader, "wrap", None) is None:
        pytest.skip("this reader has none")
    prompt = asked(bundle, tmp_path, [TEXTS["short"]])
    before, vectors, after = prompt.pieces
    wrap = bundle.reader.wrap.config  # type: ignore[union-attr]
    bare = vectors[int(wrap.before) : len(vectors) - int(wrap.after)]
    shorter = type(prompt).of(before, bare, after)
    vocabulary = len(reference(name)["one.logits"])
    (with_them, _), (without, _) = (answered(bundle, each, vocabulary, 1) for each in (prompt, shorter))
    assert (with_them - without).abs().max() > 0.1


def test_separators_of_the_app_become_those_of_training(tmp_path: Path) -> None:
    """LangChain and LlamaIndex put a blank line between passages, PISCO nothing; a user's own text stays."""
    bundle = imported("pisco", tmp_path / "bundle")
    texts = TEXTS["prompts"]["several"]
    prompt = asked(bundle, tmp_path / "store", texts)
    assert [len(piece) for piece in prompt.pieces[1:4]] == [9, 0, 9]
    config = json.loads((tmp_path / "bundle/config.json").read_text())
    assert config["separator"] == "" and "Background:" in config["template"]


def test_other_ratios_than_the_trained_one_are_refused(name: str, bundle: Bundle) -> None:
    other = bundle.config.base_ratio * 2
    with pytest.raises(RatioError, match=f"{other}"):
        bundle.compress([TEXTS["short"]], other)

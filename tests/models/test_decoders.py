"""Types of decoders, tiny, through the library's ways, against plain computations: `benchmarks.decoders.trial`."""

from pathlib import Path

import pytest

from benchmarks.decoders.build import WRAPPERS, decoder_types
from benchmarks.decoders.methods import try_methods
from benchmarks.decoders.outcome import YES
from benchmarks.decoders.trial import try_decoder


# Layers with a state, and windows with experts; plain layers answer and train in all other tests.
@pytest.mark.parametrize("name", ["falcon_h1", "gpt_oss"])
def test_a_decoder_answers_and_trains(name: str, tmp_path: Path) -> None:
    assert set(try_decoder(name, tmp_path, ("answer", "train")).values()) == {YES}


@pytest.mark.slow
@pytest.mark.parametrize("name", decoder_types() + WRAPPERS)
def test_every_decoder_is_right_or_refused(name: str, tmp_path: Path) -> None:
    assert not [said for said in try_decoder(name, tmp_path).values() if said.startswith(("wrong", "error"))]


# A state runs through layers of the first two, and layers of Gemma 3n pass on four streams.
REFUSED = {
    "falcon_h1": {"compression tokens"},
    "mamba2": {"compression tokens"},
    "gemma3n_text": {"ComprExIT", "ArcAligner"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REFUSED, "deepseek_v3", "gemma4_text", "gpt_oss", "llama", "llama4_text"])
def test_other_methods_are_right_or_refused(name: str, tmp_path: Path) -> None:
    found = {title: said for title, said in try_methods(name, tmp_path).items() if said != YES}
    assert found.keys() == REFUSED.get(name, set()) and all(said.startswith("refused") for said in found.values())

"""The command for a lent accelerator, on the CPU with tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.__main__ import main
from helpers.training import save_decoder, settings_of


@pytest.mark.slow
def test_parts_run_once_and_say_what_became_of_them(tmp_path: Path, tiny_tokenizer: Any) -> None:
    decoder = save_decoder(tmp_path / "decoder", tiny_tokenizer)
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "told"
    command = ["accelerator", "--tiny", "--recipe", str(recipe), "--output", str(output), "--minutes"]

    def states(minutes: str) -> dict[str, str]:
        assert main([*command, minutes]) == 0
        return {name: part["state"] for name, part in json.loads((output / "results.json").read_text()).items()}

    assert states("0") == {"bundle": "not run", "speed tiny": "not run"}
    assert states("9") == {"bundle": "failed", "speed tiny": "done"}  # there is no such recipe
    recipe.write_text(yaml.safe_dump(settings_of(decoder, "packed", tmp_path / "run", {"steps": 1})))
    assert states("9") == {"bundle": "done", "speed tiny": "done"}
    assert (tmp_path / "run" / "bundle").exists()

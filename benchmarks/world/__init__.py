"""An invented world, and a decoder of 4 M parameters that reads it: data that no model knows, for quick tests."""

from pathlib import Path

BUNDLE = Path(__file__).parent / "bundle"
"""The bundle trained on it by the recipes in `recipes/demo`."""

RECIPES = Path(__file__).parent / "recipes"

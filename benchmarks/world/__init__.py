"""An invented world, and a decoder of 4 M parameters that reads it: data that no model knows, for quick tests."""

from pathlib import Path

BUNDLE = Path(__file__).parent / "bundle"
"""The bundle trained on it: the decoder from nothing, then mean pooling by distillation."""

RECIPES = Path(__file__).parent / "recipes"

"""Engines, which turn prompts into answers, in one module each."""

"""Prompts, tokens, sentences and the sentence encoder."""

"""Decoders: what turns a prompt with soft contexts into text."""

"""Adapt a decoder to a few demonstrations in one forward pass (RAG-GD)."""

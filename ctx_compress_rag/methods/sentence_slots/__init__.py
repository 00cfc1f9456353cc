"""Sentence slots, and xRAG with one slot for a passage."""

"""Compression tokens."""

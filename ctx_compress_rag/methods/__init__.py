"""Compression methods, one module or folder each, and their registry."""

"""Compression methods: one folder each, and the registry of them."""

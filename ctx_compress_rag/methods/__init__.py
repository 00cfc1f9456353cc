"""Compression methods: one folder each, and their registry."""

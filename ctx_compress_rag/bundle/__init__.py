"""A trained compressor for one decoder."""

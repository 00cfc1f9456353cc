"""Readers: the decoder's side of a method."""

"""Tokens, sentences, chat formats, quotations, scores of answers."""

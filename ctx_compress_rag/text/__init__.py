"""Tokens, sentences, chat formats, quotations and scores of answers."""

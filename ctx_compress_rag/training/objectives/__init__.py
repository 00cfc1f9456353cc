"""Objectives: what the stages of training minimize, each with the collator that feeds it."""

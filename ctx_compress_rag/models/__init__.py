"""Load, identify and run two kinds of models: a decoder with LoRA adapters, and a sentence encoder."""

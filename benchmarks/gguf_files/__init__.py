"""GGUF files: which decoders are read from them, and which llama.cpp runs."""

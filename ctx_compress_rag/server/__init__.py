"""An OpenAI-compatible server: one process owns model and store, clients in any language send markers."""

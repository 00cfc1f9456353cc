"""Every response mode and engine of LlamaIndex, its LLM with vLLM: the answers are those of the decoder here."""

from integrations.llama_index_app.test_llama_index_engines import *  # noqa: F403 - with this folder's `app`

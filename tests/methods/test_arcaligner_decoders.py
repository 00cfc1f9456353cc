"""ArcAligner with decoders that are called, or placed, in other ways than most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.loading import load_decoder
from helpers import architectures
from helpers.arcaligner import alone, make_reader, merged_model, prompts, read


@pytest.mark.parametrize("name", ["XGLM", "BioGpt", "GPTNeoX", "Falcon", "Bloom"])
def test_decoders_with_calling_habits_of_their_own(name: str) -> None:
    """Arguments by place (XGLM's mask, the trunk's ids), a cache called `layer_past`, layers that return a tuple."""
    tokenizer = architectures.tokenizer("Llama")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, max_position_embeddings=256, ffn_dim=64, intermediate_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    reader = make_reader(model=getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False))
    batch = prompts(reader)
    with reader.record_loops() as loops:
        out = read(reader, batch, use_cache=True)
    assert sum(int((record > 0).sum()) for record in loops.values()) > 2
    for layer in range(2):
        assert out.past_key_values.get_seq_length(layer) == batch.inputs_embeds.shape[1]
    for row in range(2):
        prompt, real = alone(batch, row), batch.attention_mask[row].bool()
        with torch.no_grad():
            expected = merged_model(reader, prompt.slot_mask)(**prompt.model_inputs(), use_cache=False).logits[0]
        torch.testing.assert_close(out.logits[row, real], expected, atol=1e-4, rtol=1e-4)


def test_a_decoder_with_offloaded_weights(tmp_path: Path) -> None:
    """accelerate replaces the `forward` of modules whose weights are elsewhere; a second prompt meets it, too."""
    plain = make_reader()
    batch = prompts(plain)
    plain.backbone.model.save_pretrained(tmp_path)
    plain.backbone.tokenizer.save_pretrained(tmp_path)
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    backbone = Backbone(*load_decoder(tmp_path, dtype="float32", device_map=device_map))
    reader = ArcAlignerReader(backbone, 12, plain.config)
    reader.load_saved_state(plain.saved_state())
    for _ in range(2):
        assert torch.equal(read(reader, batch).logits, read(plain, batch).logits)

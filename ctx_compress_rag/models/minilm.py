"""The packaged MiniLM with transformers, for many texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ctx_compress_rag.models.loading import progress_line
from ctx_compress_rag.models.sentence_embedding import question_minilm
from ctx_compress_rag.text.tokenizing import length_batches

_BATCH_TOKENS = 2048


class MiniLm:
    """The packaged all-MiniLM-L6-v2 on the CPU, without sentence-transformers, which takes seconds to import."""

    def __init__(self) -> None:
        from transformers import BertModel

        packaged = question_minilm()
        self._tokenizer = packaged.tokenizer
        with progress_line("loading MiniLM"):
            model: Any = BertModel.from_pretrained(packaged.folder, use_safetensors=True, add_pooling_layer=False)
        self.model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], **options: object) -> Any:
        """Return unit vectors (texts, 384), float32 NumPy, in the direction of the mean of the last hidden states."""
        rows = [torch.tensor(each.ids) for each in self._tokenizer.encode_batch(list(texts))]
        lengths = torch.tensor([len(row) for row in rows])
        vectors = np.empty((len(rows), self.model.config.hidden_size), np.float32)
        for batch in length_batches(lengths.tolist(), _BATCH_TOKENS):
            ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in batch], batch_first=True)
            mask = (torch.arange(ids.shape[1]) < lengths[batch].unsqueeze(1)).float()
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors[batch] = F.normalize((hidden * mask.unsqueeze(-1)).sum(1)).numpy()
        return vectors

    encode_document = encode_query = encode

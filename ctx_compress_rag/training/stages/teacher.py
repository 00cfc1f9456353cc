"""The teacher: a decoder that is trained to answer from full text, on the answers' tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle.files import ADAPTER_FILE, TEACHER
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.methods.base.compressor import pad_token_ids
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.layers import logits_at
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.training.config import PackingConfig, Recipe
from ctx_compress_rag.training.engine.layers import speed_up_training, transformers_layers
from ctx_compress_rag.training.engine.loop import BatchMeanLoss, Collate, TrainingJob, training_processes
from ctx_compress_rag.training.engine.packing import PackedRows, RowPacker, collate_packed, keeps_apart, packed_loss
from ctx_compress_rag.training.objective import ExampleCollator
from ctx_compress_rag.training.prompts import TrainingPromptBuilder, draw_prompt_template, load_training_examples
from ctx_compress_rag.training.stages.compression import decoder_report


class TeacherRecipe(Recipe):
    """The recipe of a teacher: a decoder's LoRA adapter, trained on question answering with full text.

    Attributes:
        decoder: a folder, hub id or GGUF file.
        revision: the decoder's revision on the hub; None takes the newest.
        tune: the adapter, whose mode must be "lora".
        packing: the size of a packed batch; prompts without room in their batch are left out. None packs nothing.
    """

    stage: Literal["teacher"]
    decoder: str | GgufDecoder
    revision: str | None = None
    tune: TuneConfig = TuneConfig()
    packing: PackingConfig | None = None

    @model_validator(mode="after")
    def _is_an_adapter(self) -> Self:
        if self.tune.mode != "lora":
            raise ValueError(f"tune.mode is {self.tune.mode}: a teacher is a LoRA adapter, so give lora")
        return self

    def make_job(self) -> TrainingJob:
        """Return a job that will train a decoder's adapter on the recipe's questions, and save the adapter."""
        examples: Any = load_training_examples(self)
        backbone = Backbone(*load_decoder(self.decoder, self.revision, training_processes().device))
        base, tokenizer = backbone.model, backbone.tokenizer
        backbone.add_adapter(TEACHER, lambda: lora_config(self.tune))
        builder = TrainingPromptBuilder(tokenizer, self.data.max_answer_tokens)
        data = self.data
        model: nn.Module
        collate: Collate
        if self.packing:
            examples = PackedTextData(builder, examples, self)
            collate = collate_packed
            speed_up_training(base, self.optim)
            model = PackedTextLoss(backbone)
        else:
            collate = TextCollator(builder, data.templates, data.max_context_tokens, self.seed)
            model = AnswerLoss(backbone)

        def save(report: dict[str, Any]) -> None:
            save_file(backbone.adapter_state(TEACHER), self.output / ADAPTER_FILE, metadata={"format": "pt"})
            config = base.peft_config[TEACHER]
            config.base_model_name_or_path, config.revision = base.name_or_path, self.revision
            config.save_pretrained(str(self.output))

        about = decoder_report(backbone, model)
        layers, micro = transformers_layers([base]), 1 if self.packing else None
        return TrainingJob(model, examples, collate, save, about=about, layers=layers, micro_batch_size=micro)


class AnswerLoss(BatchMeanLoss, nn.Module):
    """The next-token loss on the answers' tokens, averaged over the batch."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.adapter = nn.ParameterList(backbone.train_adapter(TEACHER))  # the decoder is no submodule

    def items(self, answers: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return answers[:, 1:].sum().float()

    def loss(self, items: Tensor, input_ids: Tensor, answers: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        """Return the loss of a right-padded batch; tensors are (batch, length).

        The decoder gets no mask, because no real token attends to padding on its right, and causal attention is faster.
        """
        wanted = answers[:, 1:]
        with self.backbone.use(TEACHER) as model:
            logits = logits_at(model, F.pad(wanted, (0, 1)), input_ids=input_ids)
        return F.cross_entropy(logits, input_ids[:, 1:][wanted], reduction="sum") / items


@dataclass
class TextCollator(ExampleCollator):
    """A collator that turns examples into a right-padded batch of full-text prompts, with a template drawn for each."""

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        prompts = []
        for example in examples:
            template = draw_prompt_template(self.templates, example, self.seed)
            # Truncate passages, never the prompt, which ends with the answer.
            texts = [text for text, _ in self.builder.shortened(example.passages, self.max_context_tokens)]
            prompts.append(self.builder.text_prompt(example, template, texts))
        ids, mask = pad_token_ids([prompt.ids().tolist() for prompt in prompts], torch.device("cpu"))
        answers = nn.utils.rnn.pad_sequence([torch.from_numpy(prompt.answers) for prompt in prompts], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "answers": answers}


class PackedTextLoss(nn.Module):
    """The mean cross-entropy of the answers' tokens in packed rows, for a decoder with an adapter and a frozen head."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.adapter = nn.ParameterList(backbone.train_adapter(TEACHER))  # the decoder is no submodule
        self.packs = keeps_apart(backbone.model)

    def forward(self, batch: PackedRows) -> dict[str, Tensor]:
        batch = (batch if self.packs else batch.apart()[0]).to(self.backbone.device)
        with self.backbone.use(TEACHER) as model:
            return {"loss": packed_loss(model, batch, input_ids=batch.input_ids)}


@dataclass
class PackedTextData:
    """The batches of a training, each made when it is asked for; the same number gives the same batch.

    Each batch takes the next examples, again and again, and leaves out those without room.
    """

    builder: TrainingPromptBuilder
    examples: Sequence[Example]
    recipe: TeacherRecipe

    def __len__(self) -> int:
        return self.recipe.optim.items

    def __getitem__(self, number: int) -> PackedRows:
        packing, data = self.recipe.packing, self.recipe.data
        assert packing is not None
        packer = RowPacker(packing.rows, packing.length)
        first = number * packing.examples
        numbers = list(range(first, first + packing.examples))
        random.Random(f"{self.recipe.seed}:{number}").shuffle(numbers)
        for place in numbers:
            example = self.examples[place % len(self.examples)]
            prompt = self.builder.text_prompt(example, draw_prompt_template(data.templates, example, self.recipe.seed))
            if packer.fits(prompt.length):
                packer.add(torch.from_numpy(prompt.ids()), torch.from_numpy(prompt.answers))
        return packer.packed

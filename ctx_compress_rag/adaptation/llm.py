"""`adapt` for the frameworks' LLM classes. Nothing else of this room is imported before it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.frameworks.llm import DecoderLLM

if TYPE_CHECKING:
    from ctx_compress_rag.adaptation.decoder import Adaptation, AdaptiveDecoder
    from ctx_compress_rag.adaptation.demonstrations import Demonstration


class AdaptableLLM(DecoderLLM):
    """A `DecoderLLM` that adapts to demonstrations; comes before the framework's own base class."""

    predictor: str | Path | None = None

    def adapt(
        self,
        demonstrations: Sequence[Demonstration],
        adaptation: Adaptation | str | Path | None = None,
        ratio: int | None = None,
    ) -> Self:
        """An LLM that answers as the demonstrations do (RAG-GD); this one stays unchanged.

        All LLMs adapted from one share its weights in memory, and may be used side by side in threads.
        `adaptation.decoder.generate_together` answers with several of their decoders in one batch.

        Args:
            demonstrations: solved examples: question, passages, answer.
            adaptation: a way to adapt, or the folder of an update predictor; by default the LLM's own `predictor`.
            ratio: read the demonstrations' passages as soft contexts of the store with this many source tokens per
                slot (missing ones are compressed); None reads them as they are, texts or markers.

        Raises:
            ConfigError: there are no demonstrations, or no adaptation, or the decoder runs in a server.
            BundleError: the folder holds nothing for this decoder.
        """
        from ctx_compress_rag.adaptation.predicted import load_predictor

        chosen = adaptation or self.predictor
        if chosen is None:
            raise ConfigError(f"{type(self).__name__} has no predictor: give predictor=, or adapt() an adaptation")
        decoder = self._adaptive()
        with self.in_scope():
            if ratio is not None:
                demonstrations = [demonstration.marked(self.store, ratio) for demonstration in demonstrations]
            if isinstance(chosen, str | Path):
                chosen = load_predictor(chosen, decoder)
            return self._with_decoder(decoder.adapt(demonstrations, chosen))

    def with_adapter(self, folder: str | Path) -> Self:
        """An LLM with a saved peft adapter of this decoder's Q/K/V projections; this one stays unchanged.

        Raises:
            BundleError: the folder holds no adapter for this decoder.
        """
        from ctx_compress_rag.adaptation.adapter import Adapter
        from ctx_compress_rag.adaptation.decoder import Adapted

        decoder = self._adaptive()
        adapter = Adapter.from_pretrained(folder, decoder.bundle.backbone.model)
        return self._with_decoder(decoder.with_change(Adapted(adapter)))

    def save_adapter(self, folder: str | Path) -> None:
        """Write what `adapt` changed as an ordinary peft adapter, which `with_adapter` and other engines load.

        Raises:
            ConfigError: this LLM is not adapted.
        """
        decoder = self._adaptive()
        if decoder.adapted.adapter is None:
            raise ConfigError("this LLM is not adapted: there is no adapter to save")
        decoder.adapted.adapter.save_pretrained(folder, decoder.bundle.decoder_name)

    def _adaptive(self) -> AdaptiveDecoder:
        from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder

        return AdaptiveDecoder.of(self.decoder)

"""HyperTuning, a baseline of section 5.3: the predictor is trained on answers, not on gradient descent's updates."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.adaptation.stages import Contexts, EpisodeBatches, UpdatePredictorRecipe
from ctx_compress_rag.adaptation.updates import answer_losses
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.prompt import Prompt


class HyperTuningRecipe(UpdatePredictorRecipe):
    """Train the predictor on the answers to further questions.

    Its first updates have the norms of gradient descent's, so `inner_steps` and `inner_learning_rate` count here, too.
    """

    stage: Literal["hypertuning"]  # type: ignore[assignment]
    contexts: None = None

    def objective(self, batches: EpisodeBatches, update: PredictedUpdate) -> nn.Module:
        return TaskObjective(batches.decoder.bundle, update, lambda numbers: list(batches.queries(numbers)["rows"]))


class TaskObjective(nn.Module):
    """The answer loss on a question of the same task (of `queries`, by the episode), with the predicted update."""

    def __init__(
        self, decoder: PlainDecoder, update: PredictedUpdate, queries: Callable[[Sequence[int]], list[Prompt]]
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.queries = queries
        self.update = update
        self.predictor = update.predictor

    def forward(self, numbers: Sequence[int], contexts: Contexts) -> dict[str, Tensor]:
        """The loss of a batch: the query of an episode is answered with the update of its context."""
        adapter = self.update.base.plus(self.update.predict(self.decoder, contexts))
        return {"loss": answer_losses(self.decoder, [[query] for query in self.queries(numbers)], adapter).mean()}

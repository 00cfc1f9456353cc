"""Run the decoder in this process with transformers."""

import threading
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.answering import GrowingAnswer
from ctx_compress_rag.decoding.engines.protocol import EngineOptions, Halt
from ctx_compress_rag.decoding.engines.scheduling import DecodingRequest, DecodingScheduler
from ctx_compress_rag.decoding.engines.sharing import DecodingBatch, LocalModel, decoder_memory_error
from ctx_compress_rag.decoding.sampling import Generation, Put, Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.generation import continue_prompt
from ctx_compress_rag.models.transformers_internals import can_share_cache
from ctx_compress_rag.prompt import Prompt

_SCHEDULERS: WeakKeyDictionary[Backbone, DecodingScheduler] = WeakKeyDictionary()
_MAKING = threading.Lock()


class TransformersEngine:
    """An engine that answers with a bundle's own model; all engines of one model share its forward passes."""

    def __init__(self, bundle: PlainDecoder, options: EngineOptions) -> None:
        self._bundle = bundle
        _ = bundle.backbone.base  # loaded now rather than by the first question
        self.batch_size, self._merge = options.batch_size, options.merge
        if self._merge and (not (isinstance(bundle, Bundle) and bundle.reader.mergeable) or bundle.backbone.quantized):
            raise ConfigError("merge=True: only a reader with LoRA on weights that are not quantized can be merged")

    @property
    def identity(self) -> Mapping[str, str]:
        backbone = self._bundle.backbone
        return {
            "engine": "transformers",
            "dtype": str(backbone.dtype),
            "quantized": str(backbone.quantized),
            "merge": str(self._merge),
        }

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True) -> Halt:
        """Start to answer, as `protocol.Engine.begin` says; if this thread locked the model, first end all answers."""
        backbone, canceled = self._bundle.backbone, threading.Event()
        tokenizer, settings = self._bundle.tokenizer, backbone.generation_config
        window = backbone.window
        requests = []
        for prompt, put in zip(prompts, puts, strict=True):
            model = LocalModel(self._bundle, prompt.side, self._merge)
            answering = GrowingAnswer(prompt, sampling, tokenizer, settings, window, put if stream else None)
            requests.append(DecodingRequest(model, prompt, answering, put, canceled, self.batch_size))
        if backbone.lock.held:  # another thread would wait for this one forever
            _answer_alone(requests)
        elif can_share_cache(backbone.base):
            with _MAKING:
                scheduler = _SCHEDULERS.setdefault(backbone, DecodingScheduler(DecodingBatch))
            scheduler.add(sorted(requests, key=lambda each: (each.prompt.side, each.prompt.length)))
        else:
            threading.Thread(target=_answer_alone, args=(requests,), name="ctx-compress-answers").start()
        return canceled.set

    def close(self) -> None:
        """Do nothing, because the engine holds nothing besides the bundle."""


def _answer_alone(requests: Sequence[DecodingRequest]) -> None:
    """Answer one prompt after the other with transformers' own `generate`, which runs any model."""
    for request in requests:
        try:
            answer = _generate(request)
        except BaseException as error:
            request.deliver(decoder_memory_error(error, [request.prompt]))
        else:
            if answer is not None:
                request.deliver(answer)


def _generate(request: DecodingRequest) -> Generation | None:
    answer: Generation | None = None

    def choose(scores: Tensor) -> int | None:
        nonlocal answer
        answer = request.answering.take(scores)
        return None if answer is not None or request.canceled.is_set() else request.answering.ids[-1]

    reader: LocalModel = request.read_by
    batch = splice_prompts(reader.bundle.backbone.inputs, [request.prompt])
    with reader.open(batch.slot_mask) as model:
        if request.canceled.is_set():
            return None
        continue_prompt(model, batch.inputs, choose, request.answering.limit)
    return answer

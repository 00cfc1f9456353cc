"""Compress documents while they are ingested."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from llama_index.postprocessor.ctx_compress.nodes import is_text, own_text


class CompressSoftContext(TransformComponent):
    """Compresses nodes into a soft-context store as they are ingested, so that no question has to wait for it.

    A step of an `IngestionPipeline` or of an index's `transformations`, after those that change texts or ids
    (splitters, extractors that rewrite); before or after the embedding. Nodes pass through unchanged. Texts that
    the store already has are not compressed again; nodes with images, sound or video, and blank ones, are skipped,
    as by `CompressedContextPostprocessor`. If you delete nodes from the index, call `SoftContextStore.delete`, too:
    a pipeline does not tell its steps.

    A pipeline's cache never skips this step, since a cached result would leave a new or emptied store without
    slots. A cache on disk grows with each run; `disable_cache=True` prevents that.

    Args:
        store: where the soft contexts go.
        show_progress: show a progress bar.

    Raises:
        ConfigError: in a call, an id is given with two texts; or the pipeline has `num_workers`, whose
            processes cannot share the store's model and database.
        PayloadError, StoreLockedError: in a call, as `SoftContextStore.add`.
    """

    store: SoftContextStore = Field(exclude=True, repr=False)
    show_progress: bool = False

    @classmethod
    def class_name(cls) -> str:
        return "CompressSoftContext"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Store the nodes' soft contexts; return the nodes unchanged."""
        unique = {(node.node_id, own_text(node)): node for node in nodes if is_text(node) and own_text(node).strip()}
        self.store.add(list(unique.values()), progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Call this object in a thread: the event loop keeps running."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The fields and a random value: LlamaIndex's cache, which compares them, never skips the step."""
        return {**super().to_dict(**kwargs), "run": secrets.token_hex(8)}

    def __getstate__(self) -> NoReturn:
        """Refuse to be sent to another process; LlamaIndex would send it without its store."""
        raise ConfigError("CompressSoftContext works only in its own process: run the pipeline without num_workers")

"""Compress documents while they are ingested."""

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
    """A step of ingestion that compresses nodes into a store, so that no question has to wait for compression.

    Put it into an `IngestionPipeline` or an index's `transformations`, after the steps that change texts or ids. Nodes
    pass through unchanged; those with images, sound or video, and blank ones, are skipped. If you delete nodes from the
    index, call `SoftContextStore.delete`, too, because a pipeline does not tell its steps.

    A pipeline's cache never skips this step, because a new or emptied store would get no slots. A cache on disk grows
    with each run; `disable_cache=True` prevents that.

    Args:
        store: the store that gets the soft contexts.
        show_progress: show a progress bar.

    Raises:
        ConfigError: in a call, an id is given with two texts; or the pipeline has `num_workers`, whose processes cannot
            share the store's model and database.
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
        """Call this object in a thread, so that the event loop runs on."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields and a random value, because of which LlamaIndex's cache never skips this step."""
        return {**super().to_dict(**kwargs), "run": secrets.token_hex(8)}

    def __getstate__(self) -> NoReturn:
        """Raise ConfigError, because LlamaIndex would send this step to another process without its store."""
        raise ConfigError("CompressSoftContext works only in its own process: run the pipeline without num_workers")

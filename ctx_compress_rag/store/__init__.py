"""The store of soft contexts, in a Chroma collection beside the app's own."""

from ctx_compress_rag.store.passage import AddReport, Passage, StoredPassage, StoreInfo, SyncReport
from ctx_compress_rag.store.store import SoftContextStore

__all__ = ["AddReport", "Passage", "SoftContextStore", "StoreInfo", "StoredPassage", "SyncReport"]

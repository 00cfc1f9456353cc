"""Where soft contexts are kept: a Chroma collection beside the app's own, and the payload codecs."""

from ctx_compress_rag.stores.chroma import SoftContextStore
from ctx_compress_rag.stores.passages import AddReport, Compresses, Passage, StoredPassage, StoreInfo, SyncReport

__all__ = ["AddReport", "Compresses", "Passage", "SoftContextStore", "StoreInfo", "StoredPassage", "SyncReport"]

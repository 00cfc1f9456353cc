"""Define the base of all frameworks' postprocessors, with their options and checks."""

from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import Marking, OnMissing
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.strict import check_known_options, faults_raised_as


class MarkingPostprocessor(BaseModel):
    """The base and options of a framework's postprocessor class, listed before the framework's own base class.

    A passage is looked up in the store by its id, then by its text. With a RAM bundle, the segments that the question
    needs stay text, and markers stand for the rest of a passage; the LLM must then have the same bundle object.

    Args:
        store: the store of the soft contexts.
        ratio: source tokens per slot, a multiple of the store's ratio; None takes the store's. With a RAM bundle, how
            many times shorter all passages together become, 2 or more; None takes the bundle's smallest ratio.
        token_budget: in place of a ratio, the most tokens for all passages of a question together, with slots, text and
            the blank lines between passages, as the LLM counts them. Metadata and template are not counted. A ratio
            stands for the budget that all passages would take at this ratio.
        text_share: the share of this budget, 0 to 1, for the sentences nearest to the question (MiniLM), as text. The
            rest is for slots of the most relevant passage, which is the first if there are no scores; passages with no
            share are dropped. 0 shows every passage as slots. None shows the share with which the bundle answers best
            (`BundleConfig.text_share`), given several passages, a question and the extra `sentences`; else slots.
        on_missing: what to do with each passage that the store lacks, has with another text, or has damaged. "compress"
            compresses and stores the passage, or keeps its text with a warning if that is impossible. "error" raises.
            "text" keeps the text. See `ctx_compress_rag.marking.mark.OnMissing`.
        scope: tenant or user of the markers; None takes the scope of `ctx_compress_rag.scope`, else the store's.

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or both a ratio and a budget are given; at a
            call, a RAM bundle or a `text_share` gets no question, or a score is not a number.
        RatioError: the ratio cannot be made from what is stored; at a call, the budget is too small.
        ConfigError, MissingPassageError, PayloadError: at a call, `on_missing` is "error", and a passage is
            missing, damaged, or cannot be stored.
        StoreError: at a call, the store cannot be reached.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    store: SoftContextStore = Field(exclude=True, repr=False)
    ratio: int | None = None
    token_budget: int | None = None
    text_share: float | None = None
    on_missing: OnMissing = "compress"
    scope: str | None = None

    def __init__(self, store: SoftContextStore, **fields: Any) -> None:
        check_known_options(type(self).__name__, fields, type(self).model_fields)
        with faults_raised_as(ConfigError, f"{type(self).__name__}: "):
            super().__init__(store=store, **fields)
        _ = self.marking  # refuses impossible values

    def __getstate__(self) -> NoReturn:
        """Raise ConfigError, because the store cannot leave this process by pickling."""
        raise ConfigError(f"{type(self).__name__} holds a store of this process: create it in the other process")

    @property
    def marking(self) -> Marking:
        """Return the Marking, with these options, that turns retrieved texts into markers and sentences."""
        return Marking(self.store, self.ratio, self.token_budget, self.text_share, self.on_missing, self.scope)

"""Settings of an encoder with weights of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ctx_compress_rag.methods.base.config import OneRatioConfig, TuneConfig, WrapConfig


class OwnEncoderConfig(OneRatioConfig):
    """A frozen encoder with weights of its own, whose hidden states are pooled.

    Attributes:
        encoder: the encoder: a hub id or a folder; None if the bundle has it in `encoder/`.
        subfolder: where it is in there.
        revision: its revision on the hub.
        digest: SHA-256 of a folder's files; None on the hub, where the revision says the same.
        dim: the width of its hidden states; given here so that reading stored slots needs no encoder.
        pooling: what a slot is: the "mean" of the hidden states of `ratio` tokens, or the "last" one of a window.
        bos: whether its BOS comes before each window.
        eos: whether its end token comes after each window.
        normed: whether slots are normalized before the reader's map.
        decoder: how the decoder is adapted.
        wrap: what the decoder reads around the slots.
    """

    name: Literal["own_encoder"] = "own_encoder"
    encoder: str | None = None
    subfolder: str | None = None
    revision: str | None = None
    digest: str | None = None
    dim: int = Field(gt=0)
    pooling: Literal["mean", "last"] = "mean"
    bos: bool = False
    eos: bool = False
    normed: bool = False
    decoder: TuneConfig = TuneConfig(mode="frozen")
    wrap: WrapConfig = WrapConfig()

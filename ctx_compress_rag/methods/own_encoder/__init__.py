"""An encoder with weights of its own."""

from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import TwoLayerMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.methods.own_encoder.compressor import OwnEncoderCompressor
from ctx_compress_rag.methods.own_encoder.config import OwnEncoderConfig

register(
    Method(
        config=OwnEncoderConfig,
        compressor=OwnEncoderCompressor,
        reader=lambda backbone, config, compressor: Reader(
            backbone, TwoLayerMap(config.dim, backbone.dim, config.normed), config.decoder, config.wrap
        ),
        paper="Latent Context Language Models",
    )
)

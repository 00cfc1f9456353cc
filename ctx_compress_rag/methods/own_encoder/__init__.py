"""An encoder with weights of its own."""

from ctx_compress_rag.methods.base.mapped_reader import MappedReader
from ctx_compress_rag.methods.base.method import Method, register
from ctx_compress_rag.methods.base.projections import NormedTwoLayerMap, TwoLayerMap
from ctx_compress_rag.methods.own_encoder.compressor import OwnEncoderCompressor
from ctx_compress_rag.methods.own_encoder.config import OwnEncoderConfig

register(
    Method(
        config=OwnEncoderConfig,
        compressor=OwnEncoderCompressor,
        reader=lambda backbone, config, compressor: MappedReader(
            backbone,
            (NormedTwoLayerMap if config.normed else TwoLayerMap)(config.dim, backbone.dim),
            config.decoder,
            config.wrap,
        ),
        paper="Latent Context Language Models",
    )
)

"""EfficientNet-Lite0, ImageNet-1k. Tan et al. 2019, arXiv:1905.11946; converted from the weights Google published.

Bundled, so that a demo and the tests run a real pretrained network without a connection. Not a pathology encoder.
"""

from pathlib import Path

from wsi_mil.encoders._base import Declaration, Transform

ENCODER = Declaration(
    architecture="tf_efficientnet_lite0",
    hub_id=None,
    bundled=Path(__file__).parent / "data" / "tf_efficientnet_lite0.in1k.fp16.safetensors",
    output="pooled",
    dim=1280,
    mpp=(),
    tile_px=None,
    transform=Transform(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    licence="Apache-2.0",
    gated=False,
    pathology=False,
    label="ImageNet encoder, not a pathology one",
    source="data/README.md in this package",
)

"""Virchow: ViT-H/14, DINOv2 on 1.5 million H&E slides. Vorontsov et al. 2024, doi:10.1038/s41591-024-03141-0.

The tile embedding is the class token followed by the mean of the patch tokens.
"""

from timm.layers.mlp import SwiGLUPacked
from torch import nn

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_huge_patch14_224",
    hub_id="paige-ai/Virchow",
    arguments={
        "img_size": 224,
        "init_values": 1e-5,
        "mlp_ratio": 5.3375,
        "global_pool": "",
        "dynamic_img_size": True,
        "mlp_layer": SwiGLUPacked,
        "act_layer": nn.SiLU,
    },
    output="cls+mean",
    dim=2560,
    mpp=(0.5,),
    tile_px=224,
    transform=IMAGENET_224,
    licence="Apache-2.0, with terms of use to agree to",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E), ViT-H/14",
    source="model card and config.json of paige-ai/Virchow",
)

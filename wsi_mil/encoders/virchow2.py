"""Virchow2: ViT-H/14 with 4 registers, 3.1 million slides at four magnifications. Zimmermann et al., arXiv:2408.00738.

The tile embedding is the class token followed by the mean of the patch tokens; the registers are left out.
"""

from timm.layers.mlp import SwiGLUPacked
from torch import nn

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_huge_patch14_224",
    hub_id="paige-ai/Virchow2",
    arguments={
        "img_size": 224,
        "init_values": 1e-5,
        "reg_tokens": 4,
        "mlp_ratio": 5.3375,
        "global_pool": "",
        "dynamic_img_size": True,
        "mlp_layer": SwiGLUPacked,
        "act_layer": nn.SiLU,
    },
    output="cls+mean",
    dim=2560,
    mpp=(0.5, 0.25, 1.0, 2.0),
    tile_px=224,
    transform=IMAGENET_224,
    licence="CC-BY-NC-ND-4.0",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E and IHC, 5x to 40x), ViT-H/14",
    source="model card and config.json of paige-ai/Virchow2",
)

"""UNI2-h: ViT-H/14 with 8 registers, DINOv2 on 350,000 H&E and IHC slides. The UNI authors, 2025."""

from timm.layers.mlp import SwiGLUPacked
from torch import nn

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_giant_patch14_224",
    hub_id="MahmoodLab/UNI2-h",
    arguments={
        "img_size": 224,
        "patch_size": 14,
        "depth": 24,
        "num_heads": 24,
        "init_values": 1e-5,
        "embed_dim": 1536,
        "mlp_ratio": 2.66667 * 2,
        "no_embed_class": True,
        "mlp_layer": SwiGLUPacked,
        "act_layer": nn.SiLU,
        "reg_tokens": 8,
        "dynamic_img_size": True,
    },
    output="cls",
    dim=1536,
    mpp=(0.5,),
    tile_px=224,
    transform=IMAGENET_224,
    licence="CC-BY-NC-ND-4.0",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E and IHC), ViT-H/14",
    source="model card MahmoodLab/UNI2-h",
)

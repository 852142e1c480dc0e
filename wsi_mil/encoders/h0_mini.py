"""H0-mini: ViT-B/14 with 4 registers, distilled from H-optimus-0. Filiot et al. 2025, arXiv:2501.16239.

The class token is the tile embedding; the patch tokens that the network also gives are left out.
"""

from timm.layers.mlp import SwiGLUPacked
from torch import nn

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import BIOPTIMUS_224

ENCODER = Declaration(
    architecture="vit_base_patch14_reg4_dinov2",
    hub_id="bioptimus/H0-mini",
    arguments={
        "img_size": 224,
        "init_values": 1e-5,
        "mlp_ratio": 5.33334,
        "global_pool": "",
        "dynamic_img_size": True,
        "mlp_layer": SwiGLUPacked,
        "act_layer": nn.SiLU,
    },
    output="cls",
    dim=768,
    mpp=(0.5,),
    tile_px=224,
    transform=BIOPTIMUS_224,
    licence="CC-BY-NC-ND-4.0",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E), ViT-B/14",
    source="model card bioptimus/H0-mini",
)

"""Prov-GigaPath tile encoder: ViT-g/16, DINOv2 on 171,000 slides. Xu et al. 2024, doi:10.1038/s41586-024-07441-w.

Its card resizes to 256 px and takes the middle 224: the field of a 224 px tile at the same pixel size, as declared
here.
"""

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_giant_patch14_dinov2",
    hub_id="prov-gigapath/prov-gigapath",
    arguments={
        "img_size": 224,
        "patch_size": 16,
        "embed_dim": 1536,
        "depth": 40,
        "num_heads": 24,
        "init_values": 1e-5,
        "mlp_ratio": 5.33334,
    },
    output="cls",
    dim=1536,
    mpp=(0.5,),
    tile_px=224,
    transform=IMAGENET_224,
    licence="Apache-2.0, for research only by its terms of access",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E and IHC), ViT-g/16",
    source="model card and config.json of prov-gigapath/prov-gigapath",
)

"""Phikon: ViT-B/16, iBOT on 43 million TCGA tiles. Filiot et al. 2023, doi:10.1101/2023.07.21.23292757. A port to timm.

owkin/phikon itself is stored for another library under other tensor names; the port holds the same teacher.
"""

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_base_patch16_224",
    hub_id="1aurent/vit_base_patch16_224.owkin_pancancer",
    output="cls",
    dim=768,
    mpp=(0.5,),
    tile_px=224,
    transform=IMAGENET_224,
    licence="Owkin, non-commercial",
    gated=False,
    pathology=True,
    label="pathology encoder (H&E), ViT-B/16",
    source="model cards owkin/phikon and 1aurent/vit_base_patch16_224.owkin_pancancer",
)

"""Lunit DINO ViT-S/16 on 19 million TCGA tiles at 20x and 40x. Kang et al. 2023, arXiv:2212.04690. A port to timm."""

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import LUNIT_224

ENCODER = Declaration(
    architecture="vit_small_patch16_224",
    hub_id="1aurent/vit_small_patch16_224.lunit_dino",
    output="cls",
    dim=384,
    mpp=(0.5, 0.25),
    tile_px=224,
    transform=LUNIT_224,
    licence="Lunit, non-commercial",
    gated=False,
    pathology=True,
    label="pathology encoder (H&E), ViT-S/16",
    source="Lunit's release benchmark-ssl-pathology, and the port 1aurent/vit_small_patch16_224.lunit_dino",
)

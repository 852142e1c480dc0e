"""H-optimus-1: ViT-g/14 with 4 registers, on a million H&E slides. Bioptimus 2025. Built as H-optimus-0."""

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import BIOPTIMUS_224

ENCODER = Declaration(
    architecture="vit_giant_patch14_reg4_dinov2",
    hub_id="bioptimus/H-optimus-1",
    arguments={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
    output="cls",
    dim=1536,
    mpp=(0.5,),
    tile_px=224,
    transform=BIOPTIMUS_224,
    licence="CC-BY-NC-ND-4.0",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E), ViT-g/14",
    source="model card bioptimus/H-optimus-1",
)

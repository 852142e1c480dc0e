"""UNI: ViT-L/16, DINOv2 on 100,000 H&E slides. Chen et al. 2024, doi:10.1038/s41591-024-02857-3."""

from wsi_mil.encoders._base import Declaration
from wsi_mil.encoders._transforms import IMAGENET_224

ENCODER = Declaration(
    architecture="vit_large_patch16_224",
    hub_id="MahmoodLab/UNI",
    arguments={"img_size": 224, "init_values": 1e-5, "dynamic_img_size": True},
    output="cls",
    dim=1024,
    mpp=(0.5,),
    tile_px=224,
    transform=IMAGENET_224,
    licence="CC-BY-NC-ND-4.0",
    gated=True,
    pathology=True,
    label="pathology encoder (H&E), ViT-L/16",
    source="model card MahmoodLab/UNI",
)

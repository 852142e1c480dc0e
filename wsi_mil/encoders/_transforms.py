"""Normalisations that more than one declared encoder shares."""

from wsi_mil.encoders._base import Transform

IMAGENET_224 = Transform(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), input_px=224)
BIOPTIMUS_224 = Transform(mean=(0.707223, 0.578729, 0.703617), std=(0.211883, 0.230117, 0.177517), input_px=224)
LUNIT_224 = Transform(mean=(0.70322989, 0.53606487, 0.66096631), std=(0.21716536, 0.26081574, 0.20723464), input_px=224)

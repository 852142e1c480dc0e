"""Encoders people ask for that timm cannot open, each with the reason. None of them is half-declared."""

NOT_SUPPORTED: dict[str, str] = {
    "chief": "its tile encoder is CTransPath with its own weights, which needs the authors' modified Swin code",
    "conch": "a CoCa image tower with its own attentional pooler, opened by the authors' package only",
    "conch_v1_5": "published as code inside TITAN, opened through transformers with remote code only",
    "ctranspath": "a Swin with a convolutional stem that needs the authors' patched copy of an old timm",
    "exaonepath": "opened by the authors' own code only",
    "gpfm": "published as a training checkpoint of the authors' code, without a timm configuration",
    "hibou": "published for transformers with remote code only",
    "keep": "a vision-language model published for transformers with remote code only",
    "midnight": "published for transformers under other tensor names, without a timm configuration",
    "musk": "a BEiT-3 that needs the authors' package",
    "phikon_v2": "published for transformers under other tensor names, without a timm configuration",
    "plip": "a CLIP published for transformers; its image tower has other tensor names",
    "retccl": "a ResNet-50 in the authors' own file, behind a form, without a timm configuration",
    "titan": "a slide encoder, not a tile encoder, and published with remote code only",
}

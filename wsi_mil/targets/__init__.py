"""What a column of the cohort table means: one kind of target a file."""

from wsi_mil.targets._base import Cells, Target, TargetSpec
from wsi_mil.targets.classes import ClassTarget
from wsi_mil.targets.ordinal import OrdinalTarget
from wsi_mil.targets.regression import RegressionTarget
from wsi_mil.targets.survival import CoxTarget, SurvivalTarget

__all__ = [
    "Cells",
    "ClassTarget",
    "CoxTarget",
    "OrdinalTarget",
    "RegressionTarget",
    "SurvivalTarget",
    "Target",
    "TargetSpec",
]

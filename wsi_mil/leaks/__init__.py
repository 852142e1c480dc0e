"""Slides that stand on both sides of a fold, searched before training."""

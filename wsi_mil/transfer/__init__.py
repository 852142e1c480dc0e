"""Trained models on another cohort: ensembles, slides from outside, what differs, the model card."""

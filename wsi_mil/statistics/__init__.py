"""Figures of a study: numbers in, numbers out. Numpy only; nothing here reads a file or knows a model."""

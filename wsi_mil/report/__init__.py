"""A finished run -> metrics.json, tables and one self-contained report.html. Aware of predictions, not of models."""

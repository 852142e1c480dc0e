"""A table of labels as people keep it -> records; `wsi_mil.cohort` is the door."""

"""How patients, sites and targets are dealt to folds, and the folds of other tools; `wsi_mil.splits` is the door."""

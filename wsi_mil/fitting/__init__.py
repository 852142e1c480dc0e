"""What the training of one model is made of; `wsi_mil.training` puts it together."""

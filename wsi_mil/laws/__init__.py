"""The laws of a MIL method, one function each; `wsi_mil.contracts` lists and tries them."""

"""A small cohort composed from real tissue, so that the whole path can be tried without any data of one's own."""

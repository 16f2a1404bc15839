"""The commands `triforce bench`, `eval` and `demo`."""

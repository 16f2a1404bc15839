"""Pure functions from logits to tokens: warping, shared noise, drawing."""

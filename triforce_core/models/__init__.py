"""Models: loading them unmodified from transformers, and running packed batches through them over our KV caches."""

"""Loading models unmodified from transformers, and running packed batches through them with our KV caches."""

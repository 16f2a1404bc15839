"""What sparse caches keep of the full cache's answers: recall, perplexity, acceptance, and what selection costs."""

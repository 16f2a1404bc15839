"""What sparse caches keep of the full cache's answers: recall, acceptance, and what batches the same memory holds."""

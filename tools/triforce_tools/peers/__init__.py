"""Other servers beside ours: the same prompts over HTTP, one server at a time."""

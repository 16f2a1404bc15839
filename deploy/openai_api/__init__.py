"""The HTTP API: OpenAI's completions API over `Service`."""

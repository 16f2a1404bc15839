"""The HTTP door: OpenAI's completions API over `Service`."""

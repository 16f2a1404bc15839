"""The Ray Serve application: the OpenAI-compatible endpoint and the generation service in front of the replicas."""

"""The Ray Serve application: the OpenAI-compatible API and the gRPC API in front of the replicas."""

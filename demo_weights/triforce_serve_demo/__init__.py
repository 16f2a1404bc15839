"""The weights of TriForce Serve's demo pair. There is no code here; README.md describes the models."""

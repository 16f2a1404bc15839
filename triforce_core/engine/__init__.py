"""The engine: live requests, continuous batching, admission, snapshots. It drives the chain of tiers as one proposer."""

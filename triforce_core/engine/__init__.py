"""The engine: live requests, continuous batching, admission, snapshots, over the chain of tiers as one proposer."""

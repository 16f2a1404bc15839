"""Building of tiers and of whole chains, from the settings."""

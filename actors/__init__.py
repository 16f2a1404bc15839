"""The tiers as Ray actors that exchange token blocks over gRPC."""

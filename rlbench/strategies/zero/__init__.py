"""DeepSpeed's ZeRO: a model it trains, with float32 weights and optimizer state split over the ranks."""

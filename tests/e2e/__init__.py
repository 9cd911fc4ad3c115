"""Shoal as real processes on real NATS, gRPC and TCP, killed for real."""

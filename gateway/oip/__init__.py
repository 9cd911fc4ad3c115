"""The Open Inference Protocol, version 2, as Triton's clients speak it: over gRPC and REST."""

"""Calls of functions in what models say: their forms, reading them, having them written."""

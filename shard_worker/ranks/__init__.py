"""Tensor parallel: the ranks of one stage, each with its share of every layer."""

"""Attention over paged KV: one interface, a reference that runs anywhere, and faster ones beside it."""

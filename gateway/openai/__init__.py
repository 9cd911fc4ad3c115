"""OpenAI's HTTP API: bodies become calls, events become bodies and chunks."""

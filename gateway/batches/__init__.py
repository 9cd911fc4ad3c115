"""OpenAI's Files and Batch API: files in the bus, their lines as jobs, the answers as files again."""

"""A stage on an accelerator, behind the interface of the others; its logic runs on a processor too."""

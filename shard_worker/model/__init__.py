"""Model families: each runs a layer range on hidden states; weights come in as tensors."""

"""What SmolLM2 answers greedily in float32: the first 32 tokens, ends ignored, as transformers gives them.

`test_smollm2.py` compares them with transformers itself; other tests may rely on them.
"""

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
ANSWERS: dict[str, list[int]] = {
    "What is the capital of France?": [
        504, 3575, 282, 4649, 314, 7042, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1, 4093, 198, 57,
        5248, 3946, 288, 7198, 253, 725, 1406, 281, 260, 2342, 30, 339, 3543,
    ],
    "Write a haiku about the sea.": [
        504, 6147, 282, 260, 3426, 28, 253, 13879, 6122, 28, 198, 49, 9154, 303, 5082, 282, 260,
        10393, 28, 198, 49, 13151, 282, 260, 6122, 338, 5721, 8823, 28, 198, 49, 13151,
    ],
    "Why is the sky blue? Answer in two sentences.": [
        504, 6376, 4461, 314, 253, 966, 282, 260, 2591, 506, 5264, 24484, 8118, 281, 896, 20518, 30,
        1550, 8118, 9732, 653, 3925, 28, 357, 553, 511, 260, 4683, 282, 260, 24594, 28,
    ],
}  # fmt: skip

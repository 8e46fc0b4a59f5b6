"""Measurements: one file per question, run as `python -m benchmarks.NAME` from the root of the repository."""

# Questions that were answered once. Their results stay; `git show COMMIT:benchmarks/NAME.py` prints their code.
ARCHIVED = dict.fromkeys(
    ("cuda_graphs", "dequantize", "direct_cast", "fp8_lm_limits", "fp8_lm_policies", "lora_limits", "rlhf_limits")
    + ("rlhf_sft", "trl_profile"),
    "6f9f169",
)
